"""From text to paths, without a network: documents, tokens, routers, shards, batches."""
