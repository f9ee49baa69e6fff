"""Addresses of mirrors that no manifest may name and no peer may open."""

# Most of them fsspec opens.
HOSTILE_MIRRORS = [
    "file:///etc",
    "/etc",
    "etc",
    "local:///etc",
    "memory://a",
    "http://example.org/blobs",
    "HTTPS://example.org/blobs",
    "https://",
    "https:example.org",
    "reference://::https://example.org/refs.json",
    "https://example.org/a.zip::file:///etc",
    "simplecache::https://example.org/blobs",
    "zip://a::s3://bucket/b.zip",
    "s3://bucket::file:///etc",
    "https://example.org/?u=file:///etc",
    "https://example.org/a b",
    "https://example.org/\n",
    "https://example.org/\u0661",
    "github://org:repo@main/",
    "ssh://example.org/etc",
    "dask://",
    "",
    "https://example.org/" + "a" * 500,
]
