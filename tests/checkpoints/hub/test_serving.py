"""``paceline serve org/name:KIND`` from a hub on this machine: the default model, in parts."""

from __future__ import annotations

from pathlib import Path

import gguf
import pytest

from tests.checkpoints.hub_server import hub_server
from tests.cli.servers import start_server

TOKEN = "hf_SecretSecretSecret"


def split(path: Path, target: Path) -> list[Path]:
    """The same keys and tensors over three files or more, by ``gguf``'s own reader and writer."""
    reader = gguf.GGUFReader(path)
    writer = gguf.GGUFWriter(target, "llama", split_max_tensors=100)
    for name, field in reader.fields.items():
        if not name.startswith("GGUF.") and name != "general.architecture":
            inner = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(name, field.contents(), field.types[0], sub_type=inner)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return sorted(target.parent.glob(f"{target.stem}-*.gguf"))


@pytest.mark.thorough
def test_a_split_model_is_pulled_and_answers_as_the_whole(
    smollm2_path: Path, tmp_path: Path
) -> None:
    parts = split(smollm2_path, tmp_path / "smol-Q4_1.gguf")
    assert len(parts) >= 3
    body = {"prompt": "The capital of France is", "max_tokens": 16, "temperature": 0}
    with start_server(str(smollm2_path)) as server:
        expected = server.request("/v1/completions", body)[1]["choices"][0]["text"]
    with hub_server() as hub:
        hub.repos = {"org/smol-GGUF": {part.name: part.read_bytes() for part in parts}}
        hub.token = TOKEN
        hub.cuts = {parts[1].name: [1 << 20]}
        env = {"HF_ENDPOINT": hub.address, "HF_TOKEN": TOKEN, "HF_HUB_CACHE": str(tmp_path / "hub")}
        with start_server("org/smol-GGUF:Q4_1", "--log-level", "debug", env=env) as server:
            status, answer = server.request("/v1/completions", body)
            assert status == 200 and answer["model"] == "org/smol-GGUF:Q4_1"
            assert answer["choices"][0]["text"] == expected
            _, rest = server.stop()
            said = "".join([server.ready_line, rest, *server.errors])
        assert TOKEN not in said
        assert [request[2] for request in hub.of(parts[1].name)] == [None, f"bytes={1 << 20}-"]
