"""The service: one process for every program that speaks OpenAI's interface, and a page."""
