"""The running peer: session, outer rounds, publisher, exchange, display, command line."""
