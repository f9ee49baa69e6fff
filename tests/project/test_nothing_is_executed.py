"""Nothing that a peer sends is unpickled or executed: what the code of a peer calls and imports.

Bytes of others are read by msgpack, JSON, protobuf, safetensors and `np.frombuffer` alone. This
walks every file of the packages and refuses what would run code that bytes say; the exceptions are
listed, each with its reason.
"""

import ast
import sys
from pathlib import Path

import pytest

from support.programs.processes import ran

PACKAGE = Path(__file__).parents[2] / "dipaco"
# Modules that run what the bytes say that they read, or that start programs.
FORBIDDEN_MODULES = {
    "cPickle", "cloudpickle", "code", "codeop", "commands", "copyreg", "dill", "imp", "jinja2", "joblib", "jsonpickle",
    "marshal", "multiprocessing.reduction", "os.popen", "os.system", "pdb", "pickle", "pickletools", "pty", "runpy",
    "shelve", "subprocess", "xmlrpc", "yaml",
}  # fmt: skip
# Names that run code or programs, by whatever way they are reached.
FORBIDDEN_CALLS = {
    "__import__", "eval", "exec", "execl", "execv", "execve", "execvp", "fork_exec", "import_module", "posix_spawn",
    "spec_from_file_location",
}  # fmt: skip
FORBIDDEN_OF_OS = {"popen", "system"}
# `x.eval()` of a model sets its mode, `re.compile` and `torch.compile` are others than the
# built-in ones: these names are refused only when they stand alone.
FORBIDDEN_ALONE = {"compile", "eval", "exec"}
# Hivemind's: what they read becomes a tensor of any codec and shape, or any stranger's state.
FORBIDDEN_HIVEMIND = {
    "AutogradCompression",
    "deserialize_tensor_stream",
    "deserialize_torch_tensor",
    "load_state_from_peers",
}
# Reading with these needs the argument that keeps it from unpickling or from running code.
NEEDED_ARGUMENTS = {("torch", "load"): ("weights_only", True)}
REFUSED_ARGUMENTS = {"allow_pickle", "shell", "trust_remote_code", "preexec_fn"}

# File and finding, and why it may be.
EXCEPTIONS = {
    ("dht/channel.py", "imports multiprocessing.reduction"): (
        "speaks with the DHT process that this peer forked, over a connection that nobody else has"
    ),
    ("dht/channel.py", "imports multiprocessing.reduction.ForkingPickler"): "the same",
    ("routing/documents/chat_template.py", "imports jinja2"): (
        "fills in the chat template of a checkpoint, in a sandbox and never in a peer"
    ),
    **{
        ("routing/documents/chat_template.py", f"imports jinja2.{part}"): "the sandbox"
        for part in ("sandbox", "ext", "nodes", "parser")
    },
    ("base/bounded_process.py", "imports subprocess"): (
        "starts a file of this program with this Python, with a limit of memory"
    ),
    ("inference/serve/llama_server.py", "imports subprocess"): (
        "starts this file with this Python; its parameters are this program's own"
    ),
    ("peer/owner/idle.py", "imports subprocess"): (
        "asks loginctl since when nobody has used this machine; no word of it comes from others"
    ),
    ("peer/owner/keep_awake.py", "imports subprocess"): (
        "holds a lock with systemd-inhibit; its words stand in the file"
    ),
    ("dht/dht_process.py", "gives preexec_fn"): (
        "has p2pd, which this peer starts itself, ignore the terminal's Ctrl+C"
    ),
}


def _name(node):
    """Return the parts of a dotted name; of anything else, what follows it."""
    if isinstance(node, ast.Attribute):
        return [*_name(node.value), node.attr]
    return [node.id] if isinstance(node, ast.Name) else [""]


def _imports(node):
    """Yield what an import statement names: modules, and names in modules."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
        yield node.module
        yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _is_forbidden(module):
    parts = module.split(".")
    above = {".".join(parts[: n + 1]) for n in range(len(parts))}
    return bool(above & FORBIDDEN_MODULES) or (parts[0] == "hivemind" and parts[-1] in FORBIDDEN_HIVEMIND)


def _findings_of(node):
    yield from (f"imports {module}" for module in _imports(node) if _is_forbidden(module))
    if isinstance(node, ast.Name) and node.id in FORBIDDEN_CALLS | FORBIDDEN_ALONE:
        yield f"uses {node.id}"
    if isinstance(node, ast.Attribute):
        if node.attr in (FORBIDDEN_CALLS | FORBIDDEN_HIVEMIND) - FORBIDDEN_ALONE:
            yield f"uses {node.attr}"
        of = _name(node.value)[-1]
        if of in ("builtins", "__builtins__") or (of == "os" and node.attr in FORBIDDEN_OF_OS):
            yield f"uses {node.attr}"
    if isinstance(node, ast.Call):
        called = _name(node.func)
        given = {keyword.arg: keyword.value for keyword in node.keywords}
        needed = NEEDED_ARGUMENTS.get((called[0], called[-1])) if len(called) == 2 else None
        if needed is not None:
            value = given.get(needed[0])
            if not (isinstance(value, ast.Constant) and value.value is needed[1]):
                yield f"calls {'.'.join(called)} without {needed[0]}"
        for name in REFUSED_ARGUMENTS & {*given}:
            value = given[name]
            if not (isinstance(value, ast.Constant) and value.value is False):
                yield f"gives {name}"


def findings(file):
    """Yield what in a file would run what bytes say; one line for each kind."""
    found = (what for node in ast.walk(ast.parse(file.read_text())) for what in _findings_of(node))
    yield from sorted(dict.fromkeys(found))


def _all_findings():
    return {(str(file.relative_to(PACKAGE)), what) for file in sorted(PACKAGE.rglob("*.py")) for what in findings(file)}


def test_no_code_of_a_peer_unpickles_or_executes():
    assert _all_findings() - set(EXCEPTIONS) == set()


def test_every_exception_is_still_one():
    assert set(EXCEPTIONS) - _all_findings() == set()


HOSTILE = [
    ("import pickle", "imports pickle"),
    ("from pickle import loads", "imports pickle"),
    ("import a, marshal as m", "imports marshal"),
    ("def late():\n    import yaml", "imports yaml"),
    ("import subprocess", "imports subprocess"),
    ("from multiprocessing import reduction", "imports multiprocessing.reduction"),
    ("from os import system as s", "imports os.system"),
    ("from hivemind.compression import deserialize_torch_tensor", "deserialize_torch_tensor"),
    ("hivemind.deserialize_torch_tensor(data)", "uses deserialize_torch_tensor"),
    ("eval(data)", "uses eval"),
    ("run = exec", "uses exec"),
    ("compile(data, '', 'exec')", "uses compile"),
    ("builtins.eval(data)", "uses eval"),
    ("__import__(name)", "uses __import__"),
    ("importlib.import_module(name)", "uses import_module"),
    ("os.system(data)", "uses system"),
    ("os.popen(data)", "uses popen"),
    ("torch.load(file)", "calls torch.load without weights_only"),
    ("torch.load(file, weights_only=False)", "calls torch.load without weights_only"),
    ("torch.load(file, weights_only=flag)", "calls torch.load without weights_only"),
    ("numpy.load(file, allow_pickle=True)", "gives allow_pickle"),
    ("run(command, shell=True)", "gives shell"),
    ("load_dataset(name, trust_remote_code=flag)", "gives trust_remote_code"),
]
HARMLESS = [
    "import json, re, msgpack, importlib.metadata",
    "model.eval()",
    "re.compile(text)",
    "torch.compile(step)",
    "torch.load(file, map_location='cpu', weights_only=True)",
    "numpy.load(file, allow_pickle=False)",
    "safetensors.torch.load(data)",
    "from .pickles import system_name",
    "system = url_to_fs(address)\nsystem.open(path)",
    "create_subprocess_exec",
]


@pytest.mark.parametrize(("text", "found"), HOSTILE)
def test_the_check_finds(text, found, tmp_path):
    file = tmp_path / "wrong.py"
    file.write_text(text)
    assert any(found in line for line in findings(file))


@pytest.mark.parametrize("text", HARMLESS)
def test_the_check_leaves_alone(text, tmp_path):
    file = tmp_path / "right.py"
    file.write_text(text)
    assert list(findings(file)) == []


def test_no_unused_handler_of_hivemind_is_served():
    """Its averager would send anybody the state, and read streams of any length for a group."""
    script = (
        "import dipaco.peer.training_peer, dipaco.bootstrap.bootstrap_command\n"
        "from hivemind.p2p import ServicerBase\n"
        "def below(kind):\n"
        "    for each in kind.__subclasses__():\n"
        "        yield each\n"
        "        yield from below(each)\n"
        "for kind in below(ServicerBase):\n"
        "    if kind.__module__.startswith('dipaco'):\n"
        "        kind._collect_rpc_handlers()\n"
        "        print(*(handler.method_name for handler in kind._rpc_handlers))\n"
    )
    answer = ran(sys.executable, "-c", script, check=True)
    assert not answer.stdout.split(), "peers talk over streams of their own framing"
