"""How it is published: a node of Hivemind's DHT, the directory over it, and their bounds."""
