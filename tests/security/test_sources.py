"""What must not be in the sources: code that runs data, and text put together into queries."""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "paceline"
SOURCES = sorted(PACKAGE.rglob("*.py"))

# they run what they read
UNPICKLERS = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "marshal", "shelve"}
RUNNERS = {"eval", "exec", "compile", "__import__", "execfile"}
METHODS = {
    "recv_pyobj", "send_pyobj", "literal_eval", "unsafe_load", "full_load", "read_pickle",
    "system", "popen",
}  # fmt: skip
# parts of queries that were looked at: file -> expressions
LOOKED_AT = {
    "server/batches/store.py": {
        # question marks, as many as a constant of the module has entries
        "_marks(UNFINISHED)",
        # columns by name, the keywords of calls within that file
        "names",
    },
    "server/batches/database.py": {
        # constants of whoever calls: store.py, which is looked at too
        "table",
        "columns",
        # of the condition, such a constant as well, and of a comparison
        "also",
        "'DESC' if newest_first else 'ASC'",
    },
}
# those of the library, and of Database
SQL = {"execute", "executemany", "executescript", "row", "rows"}


def offences(tree: ast.AST, known: Collection[str] = ()) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] in UNPICKLERS:
                    yield node.lineno, f"import {alias.name}"
        elif isinstance(node, ast.ImportFrom):
            if (node.module or "").split(".")[0] in UNPICKLERS:
                yield node.lineno, f"from {node.module}"
        elif isinstance(node, ast.Call):
            yield from _call(node, known)


def _call(node: ast.Call, known: Collection[str]) -> Iterator[tuple[int, str]]:
    function = node.func
    named = {keyword.arg: keyword.value for keyword in node.keywords}
    if isinstance(function, ast.Name) and function.id in RUNNERS:
        yield node.lineno, function.id
    for name in ("trust_remote_code", "shell", "allow_pickle"):
        value = named.get(name)
        if value is not None and not (isinstance(value, ast.Constant) and not value.value):
            yield node.lineno, name
    if not isinstance(function, ast.Attribute):
        return
    owner = function.value.id if isinstance(function.value, ast.Name) else ""
    if function.attr in METHODS:
        yield node.lineno, function.attr
    if function.attr == "load" and owner == "torch":
        safe = named.get("weights_only")
        if not (isinstance(safe, ast.Constant) and safe.value is True):
            yield node.lineno, "torch.load"
    if function.attr == "load" and owner == "yaml":
        yield node.lineno, "yaml.load"
    if function.attr in SQL and node.args and not _fixed(node.args[0], known):
        yield node.lineno, f"{function.attr} of a text that is put together"


def _fixed(query: ast.expr, known: Collection[str]) -> bool:
    """Whether a query is written out; a name stands for a constant of the module."""
    if isinstance(query, ast.JoinedStr):
        # parts may be constants by name, which are written in capitals
        return all(
            isinstance(part, ast.Constant)
            or (
                isinstance(part, ast.FormattedValue)
                and (
                    (isinstance(part.value, ast.Name) and part.value.id.isupper())
                    or ast.unparse(part.value) in known
                )
            )
            for part in query.values
        )
    if isinstance(query, ast.BinOp):
        return (
            _fixed(query.left, known)
            and _fixed(query.right, known)
            and isinstance(query.op, ast.Add)
        )
    if isinstance(query, ast.Call):
        return False
    return isinstance(query, (ast.Constant, ast.Name, ast.Attribute))


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_no_code_that_runs_data(path: Path) -> None:
    name = str(path.relative_to(PACKAGE))
    found = list(offences(ast.parse(path.read_text(encoding="utf-8")), LOOKED_AT.get(name, ())))
    assert not found, f"{name}: {found}"


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from marshal import loads",
        "import a.b, dill.x",
        "socket.recv_pyobj()",
        "eval('1')",
        "x = compile(text, '', 'exec')",
        "ast.literal_eval(x)",
        "torch.load(path)",
        "torch.load(path, weights_only=False)",
        "AutoModel.from_pretrained(x, trust_remote_code=True)",
        "numpy.load(x, allow_pickle=flag)",
        "subprocess.run(x, shell=True)",
        "os.system(x)",
        "yaml.load(x)",
        "db.execute(f'select * from keys where token = {token}')",
        "db.execute('select ' + fields())",
        "db.execute('select %s' % name)",
        "db.execute('select {}'.format(name))",
        "db.row(f'select * from keys where token = {token}')",
        "db.rows('select ' + fields())",
    ],
)
def test_the_check_sees(source: str) -> None:
    assert list(offences(ast.parse(source)))


@pytest.mark.parametrize(
    "source",
    [
        "torch.load(path, weights_only=True)",
        "model(x, trust_remote_code=False)",
        "db.execute('select 1 where a = ?', (a,))",
        "db.execute(f'select {FIELDS} from t where a = ?', (a,))",
        "re.compile('x')",
        "socket.recv()",
    ],
)
def test_the_check_lets_pass(source: str) -> None:
    assert not list(offences(ast.parse(source)))
