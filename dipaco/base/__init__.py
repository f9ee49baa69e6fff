"""What everything stands on: errors, files, blobs by hash, settings, command lines."""
