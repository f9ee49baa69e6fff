"""Routing of texts, as documents of a run."""


def route_texts(router, texts, labels=None):
    documents = [router.tokenizer.document_tokens(text) for text in texts]
    return router.nearest_paths(documents, 1, labels)[:, 0]
