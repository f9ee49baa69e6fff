"""Where records are published: a node of Hivemind's DHT, the directory over it, their bounds."""
