"""From text to paths, without a network: tokenizer, corpus, features, routers, shards, batches."""
