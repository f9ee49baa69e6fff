"""What everything stands on: errors, files, blobs by hash, progress, settings."""
