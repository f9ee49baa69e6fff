"""The wire: rows and steps told and asked for, files by hash, hellos, clocks, reachability."""
