"""The running peer: session, outer rounds, refresher, exchange, display, command line."""
