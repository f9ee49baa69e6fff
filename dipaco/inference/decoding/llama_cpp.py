"""llama.cpp's C interface, as far as a decoder needs it, in the wheel `xllamacpp`.

What is handed over by value has the layout of one version, so that version is asked for.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import logging
from ctypes import c_bool, c_char_p, c_float, c_int32, c_size_t, c_uint32, c_void_p
from functools import cache
from typing import Any

logger = logging.getLogger(__name__)

INSTALL = "install it with: pip install 'dipaco[llamacpp]'"
PACKAGE, VERSION = "xllamacpp", "2026.10.11549"
MAPPED, FLASH_ATTENTION = 1, 1
_ERROR = 4


class ModelParameters(ctypes.Structure):
    """`llama_model_params`."""

    _fields_ = [
        *((name, c_void_p) for name in ("devices", "buffer_overrides")),
        *((name, c_int32) for name in ("gpu_layers", "split_mode", "load_mode", "lazy_mode")),
        ("main_gpu", c_int32),
        *((name, c_void_p) for name in ("tensor_split", "progress", "progress_data", "overrides")),
        *((name, c_bool) for name in ("vocab_only", "check_tensors", "extra_buffers", "no_host")),
        *((name, c_bool) for name in ("no_alloc", "load_mtp")),
    ]


class ContextParameters(ctypes.Structure):
    """`llama_context_params`."""

    _fields_ = [
        *((name, c_uint32) for name in ("n_ctx", "n_batch", "n_ubatch", "n_seq_max", "n_rs_seq")),
        *((name, c_uint32) for name in ("n_outputs_max", "n_outputs_max_per_seq")),
        *((name, c_int32) for name in ("n_threads", "n_threads_batch", "kind", "rope_scaling")),
        *((name, c_int32) for name in ("pooling", "attention", "flash_attention")),
        *((name, c_float) for name in ("rope_base", "rope_scale", "yarn_ext", "yarn_attention")),
        *((name, c_float) for name in ("yarn_fast", "yarn_slow")),
        ("yarn_context", c_uint32),
        ("defragment", c_float),
        *((name, c_void_p) for name in ("evaluated", "evaluated_data")),
        *((name, c_int32) for name in ("type_k", "type_v")),
        ("experts_cache", c_size_t),
        *((name, c_void_p) for name in ("abort", "abort_data")),
        *((name, c_bool) for name in ("embeddings", "offload_cache", "no_perf", "offload_ops")),
        *((name, c_bool) for name in ("full_swa", "unified")),
        ("samplers", c_void_p),
        ("n_samplers", c_size_t),
        ("other", c_void_p),
    ]


class Batch(ctypes.Structure):
    """`llama_batch`: for each token its number, its place, its text, and whether logits follow."""

    _fields_ = [
        ("count", c_int32),
        *((name, c_void_p) for name in ("tokens", "embeddings", "places", "text_counts")),
        *((name, c_void_p) for name in ("texts", "wanted")),
    ]


# Name, what comes back, what is given. Models, contexts and memories are pointers.
_FUNCTIONS: tuple[tuple[str, Any, tuple[Any, ...]], ...] = (
    ("llama_backend_init", None, ()),
    ("llama_model_default_params", ModelParameters, ()),
    ("llama_context_default_params", ContextParameters, ()),
    ("llama_model_load_from_file", c_void_p, (c_char_p, ModelParameters)),
    ("llama_init_from_model", c_void_p, (c_void_p, ContextParameters)),
    ("llama_model_free", None, (c_void_p,)),
    ("llama_free", None, (c_void_p,)),
    ("llama_get_memory", c_void_p, (c_void_p,)),
    ("llama_memory_seq_rm", c_bool, (c_void_p, c_int32, c_int32, c_int32)),
    ("llama_decode", c_int32, (c_void_p, Batch)),
    ("llama_get_logits", c_void_p, (c_void_p,)),
    ("llama_state_seq_get_size", c_size_t, (c_void_p, c_int32)),
    ("llama_state_seq_get_data", c_size_t, (c_void_p, c_void_p, c_size_t, c_int32)),
    ("llama_state_seq_set_data", c_size_t, (c_void_p, c_void_p, c_size_t, c_int32)),
)


def _log(level: int, text: bytes, _: Any) -> None:
    """Pass on what llama.cpp says when something fails; else it tells much about nothing."""
    if level == _ERROR:
        logger.warning("llama.cpp: %s", text.decode("utf-8", "replace").strip())


_LOG = ctypes.CFUNCTYPE(None, c_int32, c_char_p, c_void_p)(_log)


def installed_version() -> str | None:
    """Return the version of the wheel that is installed, None where there is none."""
    try:
        return importlib.metadata.version(PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        return None


def obstacle_to_loading() -> str | None:
    """Return why the wheel that is installed cannot be used, None if it can."""
    try:
        import gguf  # noqa: F401  writes what llama.cpp reads

        library()
    except (ImportError, OSError, AttributeError) as error:
        return f"{PACKAGE} is installed and cannot be loaded ({error}); {INSTALL}"
    return None


@cache
def library() -> Any:
    """Return the functions. The installed wheel must be of `VERSION`."""
    import xllamacpp

    found = ctypes.CDLL(xllamacpp.xllamacpp.__file__)
    for name, result, arguments in _FUNCTIONS:
        function = getattr(found, name)
        function.restype, function.argtypes = result, arguments
    found.llama_log_set.argtypes = (type(_LOG), c_void_p)
    found.llama_log_set(_LOG, None)
    found.llama_backend_init()
    return found
