"""The service: one process that everything which speaks OpenAI's interface can use."""
