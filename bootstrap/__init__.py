"""Preparing a run and operating a bootstrap node."""
