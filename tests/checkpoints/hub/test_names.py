"""Names on the hub to files of a repository, and errors that say what there is."""

from __future__ import annotations

import pytest

from paceline.checkpoints.hub.names import HubReference, parse_hub_name, parts_of, quant_of, select
from paceline.errors import CheckpointError

FOLDER = ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json",
          "chat_template.jinja", "model.safetensors.index.json", "model-00001-of-00002.safetensors",
          "model-00002-of-00002.safetensors"]  # fmt: skip
# what repositories have beside: code, pickles, second copies, other models
BESIDE = ["README.md", ".gitattributes", "pytorch_model.bin", "modeling_own.py", "model.py",
          "consolidated.safetensors", "training_args.bin", "model.pt", "original/params.json",
          "onnx/model.onnx", "sub/config.json"]  # fmt: skip
QUANTS = ["m-Q4_K_M.gguf", "m-Q8_0.gguf", "m-IQ4_XS.gguf", "m-f16.gguf", "mmproj-m-f16.gguf",
          "imatrix.gguf", "README.md"]  # fmt: skip
SPLIT = ["big/m-Q6_K-00001-of-00003.gguf", "big/m-Q6_K-00002-of-00003.gguf",
         "big/m-Q6_K-00003-of-00003.gguf"]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("org/name", HubReference("org/name")),
        ("org/Na-me_1.5B:Q4_K_M", HubReference("org/Na-me_1.5B", "", "Q4_K_M")),
        ("org/name/m.gguf", HubReference("org/name", "m.gguf")),
        ("org/name/a b/c+d", HubReference("org/name", "a b/c+d")),
        ("org/name/sub:q8_0", HubReference("org/name", "sub", "q8_0")),
        ("hf.co/org/name:Q8_0", HubReference("org/name", "", "Q8_0")),
        ("https://huggingface.co/org/name", HubReference("org/name")),
        # a file that is not here, and what no repository is called
        ("org/m.gguf", None),
        ("name", None),
        ("/org/name", None),
        ("org/name/", None),
        ("org/name/../x", None),
        ("org/name:", None),
        ("org/name:a:b", None),
        ("-org/name", None),
        ("https://example.com/org/name", None),
    ],
)
def test_parsing(name: str, expected: HubReference | None) -> None:
    assert parse_hub_name(name) == expected


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("SmolLM2-1.7B-Instruct-Q4_K_M.gguf", "Q4_K_M"),
        ("qwen1.Q4_K_M.gguf", "Q4_K_M"),
        ("smollm2-1.7b-instruct-q4_k_m.gguf", "Q4_K_M"),
        ("SmolLM-1.7B-Instruct_Q5_K.gguf", "Q5_K"),
        ("Qwen1.5-4B.f16.gguf", "F16"),
        ("m-IQ4_XS.gguf", "IQ4_XS"),
        ("m-UD-Q4_K_XL.gguf", "UD-Q4_K_XL"),
        ("m-Q4_0_4_4.gguf", "Q4_0_4_4"),
        ("Q8_0/m-Q8_0-00001-of-00002.gguf", "Q8_0"),
        ("gpt-oss-20b-mxfp4.gguf", "MXFP4"),
        ("m-TQ1_0.gguf", "TQ1_0"),
        ("m.gguf", ""),
        ("Q4.gguf.txt", ""),
        ("m-Q4_K_M-mtp.gguf", ""),
    ],
)
def test_kinds(name: str, kind: str) -> None:
    assert quant_of(name) == kind


def test_parts() -> None:
    parts = ("a/m-00001-of-00002.gguf", "a/m-00002-of-00002.gguf")
    assert parts_of(parts[0]) == parts_of(parts[1]) == parts
    for odd in ("m.gguf", "m-00001-of-00000.gguf", "m-00003-of-00002.gguf"):
        assert parts_of(odd) == (odd,)
    assert parts_of("m-00001-of-00002.safetensors") == ("m-00001-of-00002.safetensors",)


def test_a_folder_is_what_a_checkpoint_needs() -> None:
    found = select(HubReference("o/r"), [*BESIDE, *FOLDER, *QUANTS])
    assert (found.kind, found.entry, sorted(found.files)) == ("hf", "", sorted(FOLDER))
    inside = [f"sub/{name}" for name in FOLDER]
    found = select(HubReference("o/r", "sub"), [*QUANTS, *inside, "sub/deeper/config.json"])
    assert (found.kind, found.entry, sorted(found.files)) == ("hf", "sub", sorted(inside))


def test_a_folder_that_is_pooled_comes_with_its_modules() -> None:
    modules = ["modules.json", "config_sentence_transformers.json", "sentence_bert_config.json",
               "1_Pooling/config.json", "2_Dense/config.json", "2_Dense/model.safetensors",
               "1_LogitScore/config.json"]  # fmt: skip
    beside = ["2_Dense/pytorch_model.bin", "1_Pooling/notes.md", "onnx/1_Pooling/config.json"]
    found = select(HubReference("o/r"), [*FOLDER, *modules, *beside])
    assert sorted(found.files) == sorted([*FOLDER, *modules])


@pytest.mark.parametrize(
    ("reference", "files", "expected"),
    [
        (HubReference("o/r"), QUANTS, ("m-Q4_K_M.gguf",)),
        (HubReference("o/r"), ["odd.gguf", "mmproj-F16.gguf"], ("odd.gguf",)),
        (HubReference("o/r"), SPLIT, tuple(SPLIT)),
        (HubReference("o/r", tag="q8_0"), [*FOLDER, *QUANTS], ("m-Q8_0.gguf",)),
        (HubReference("o/r", tag="Q6_K"), [*QUANTS, *SPLIT], tuple(SPLIT)),
        (HubReference("o/r", "m-f16.gguf"), QUANTS, ("m-f16.gguf",)),
        (HubReference("o/r", SPLIT[2]), SPLIT, tuple(SPLIT)),
        (HubReference("o/r", "big"), [*QUANTS, *SPLIT], tuple(SPLIT)),
        (HubReference("o/r", "big", "Q6_K"), [*QUANTS, *SPLIT], tuple(SPLIT)),
    ],
)
def test_gguf_files(reference: HubReference, files: list[str], expected: tuple[str, ...]) -> None:
    found = select(reference, files)
    assert (found.kind, found.entry, found.files) == ("gguf", expected[0], expected)


@pytest.mark.parametrize(
    ("asked", "files", "message"),
    [
        ("o/r:Q5_K", QUANTS, "^o/r has no Q5_K; there are F16, IQ4_XS, Q4_K_M, Q8_0$"),
        ("o/r:Q5_K", ["m.gguf"], "^o/r has no Q5_K; m.gguf$"),
        ("o/r:Q5_K", FOLDER, "^o/r has nothing to serve: neither"),
        ("o/r/x.gguf", QUANTS, "^o/r has no file x.gguf; there are m-IQ4_XS.gguf, "),
        ("o/r/x.gguf", BESIDE, "o/r has no file x.gguf; only pickled weights"),
        ("o/r/m-f16.gguf:F16", QUANTS, "o/r/m-f16.gguf is a file: leave :F16 out"),
        ("o/r/README.md", QUANTS, "o/r/README.md is a file that is no model"),
        ("o/r/sub", SPLIT, "^o/r has no sub; its folders are big$"),
        ("o/r/sub", QUANTS, "^o/r has no sub; it has no folders$"),
        ("o/r", ["a-Q8_0.gguf", "b-Q8_0.gguf"], "of kind Q8_0, name one: a-Q8_0.gguf, b-Q8"),
        ("o/r", ["a.gguf", "b-Q2_K.gguf"], "several GGUF files, name one: a.gguf, b-Q2"),
        ("o/r", SPLIT[:2], "o/r lacks parts of a split file: big/m-Q6_K-00003-of-00003"),
        ("o/r", ["README.md"], "neither safetensors with a config.json nor GGUF .* but README"),
        ("o/r", ["config.json", "pytorch_model.bin"], "only pickled weights .pytorch_model.bin"),
    ],
)
def test_refusals(asked: str, files: list[str], message: str) -> None:
    reference = parse_hub_name(asked)
    assert reference is not None
    with pytest.raises(CheckpointError, match=message):
        select(reference, files)
