"""What a peer tells of itself: lines and a panel for people, events for files, metrics."""
