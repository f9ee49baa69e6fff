"""What a peer reports about itself: lines and a panel for people, events for files, metrics."""
