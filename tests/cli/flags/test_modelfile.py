"""Modelfiles: one that names the served model and an adapter is served, any other is refused."""

import argparse
from pathlib import Path

import pytest

from paceline.cli.flags.adapter_options import adapter_config, add_adapter_options
from paceline.cli.flags.arguments import Parser
from paceline.cli.flags.modelfile import read_modelfile
from paceline.errors import ConfigError


def write(folder: Path, text: str) -> Path:
    (folder / "sql").mkdir(exist_ok=True)
    path = folder / "Modelfile"
    path.write_text(text)
    return path


def serve(path: Path, model: str = "base", *names: str) -> str:
    """Return the path that an adapter is loaded from."""
    parser = Parser(prog="paceline serve")
    add_adapter_options(parser)
    args = parser.parse_args(
        ["--enable-lora", "--lora-modules", f"sql={path}"],
        argparse.Namespace(model=model, served_model_name=list(names)),
    )
    (module,) = adapter_config(args).modules
    assert module.name == "sql"
    return module.path


def test_a_modelfile_names_the_folder_of_its_adapter(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        '# made for tests\nfrom base:latest\n\nADAPTER ./sql\nLICENSE """\nPARAMETER of it\n"""\n',
    )
    assert serve(path) == str(tmp_path / "sql")
    assert serve(path, "/models/b.gguf", "base") == str(tmp_path / "sql")
    model = tmp_path / "m.gguf"
    model.write_bytes(b"GGUF")
    write(tmp_path, f"FROM ./m.gguf\nADAPTER {tmp_path}/sql")
    assert serve(path, str(model)) == str(tmp_path / "sql")


def test_other_paths_are_left_as_they_are(tmp_path: Path) -> None:
    (tmp_path / "Modelfile").mkdir()
    for path in (tmp_path / "Modelfile", tmp_path / "a.gguf", tmp_path / "modelfile-of-nothing"):
        assert serve(path) == str(path)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("FROM other\nADAPTER sql", "FROM 'other' is not the model that is served (base)"),
        ("FROM base", "has no ADAPTER"),
        ("ADAPTER sql", "has no FROM"),
        ("FROM base\nADAPTER", "has no ADAPTER"),
        ("FROM base\nADAPTER nowhere", "nowhere: no such file or folder"),
        ("FROM base\nADAPTER sql\nADAPTER sql", "line 3: a second ADAPTER is not served"),
        ("FROM base\nPARAMETER temperature 1\nADAPTER sql", "line 2: PARAMETER is not served"),
        ('FROM base\nSYSTEM """\nADAPTER x\n"""', "line 2: SYSTEM is not served"),
        ("\0\0\0", "is not served"),
    ],
)
def test_what_is_not_served_is_refused_by_name(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        serve(write(tmp_path, text))
    assert said in str(caught.value)


def test_what_is_no_text_is_no_modelfile(tmp_path: Path) -> None:
    path = tmp_path / "x.modelfile"
    for contents, said in ((b"FROM \xff", "cannot be read"), (b"#" * (1 << 21), "no Modelfile")):
        path.write_bytes(contents)
        with pytest.raises(ConfigError, match=said):
            read_modelfile(path)
