"""The running peer: session, clock, exact averaging, exchange of states, display, command line."""
