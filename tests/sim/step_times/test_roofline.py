"""The roofline: limits by hand, what moves it, and the data files."""

from __future__ import annotations

from dataclasses import replace

import pytest

from paceline.errors import ConfigError
from paceline.sim.step_times.models import ModelShape, known_models
from paceline.sim.step_times.roofline import HardwareCard, RooflineStepTimes, known_hardware
from tests.sim.step_times.profiles import MODEL
from tests.sim.step_times.test_profile import plan

CARD = HardwareCard(
    name="toy",
    flops=1e12,
    bandwidth=1e10,
    memory=1e9,
    link_bandwidth=1e9,
    flops_efficiency=1.0,
    bandwidth_efficiency=1.0,
    step_overhead=0.001,
)


def test_a_lone_token_reads_the_weights() -> None:
    weights = MODEL.num_layers * MODEL.layer_parameters
    head = MODEL.hidden_size * MODEL.vocab_size
    keys = 11 * MODEL.kv_bytes_per_token()
    width = 2 * MODEL.hidden_size + 3 * MODEL.intermediate_size
    moved = 2 * weights + 2 * head + keys + 4 * MODEL.num_layers * width
    times = RooflineStepTimes(CARD, MODEL)
    assert times.seconds(plan((10, 1))) == pytest.approx(0.001 + moved / 1e10)


def test_a_long_prompt_computes() -> None:
    tokens = 10**6
    matrices = 2 * MODEL.num_layers * MODEL.layer_parameters * tokens / 1e12
    attention = 4 * MODEL.num_layers * 64 * tokens * tokens / 2 / 1e12
    head = 2 * MODEL.hidden_size * MODEL.vocab_size / 1e10
    fast = replace(CARD, bandwidth=1e10)
    seconds = RooflineStepTimes(fast, MODEL).seconds(plan((0, tokens)))
    assert seconds == pytest.approx(0.001 + matrices + attention + head, rel=0.01)


def test_more_devices_more_work_less_time() -> None:
    decode, prompt = plan(*[(500, 1)] * 64), plan((0, 2000))
    model = ModelShape.named("Llama-3.1-8B")
    one = RooflineStepTimes(HardwareCard.named("h100-sxm"), model)
    two = RooflineStepTimes(HardwareCard.named("H100-SXM"), model, degree=2)
    assert HardwareCard.named("rtx4090") is not None
    assert HardwareCard.named("RTX 4090") == HardwareCard.named("rtx-4090")
    assert two.seconds(decode) < one.seconds(decode) < one.seconds(prompt)
    assert two.num_blocks(16) > 2 * one.num_blocks(16)
    eight_bit = RooflineStepTimes(one.card, model, weight_bytes=1.0, kv_bytes=1.0)
    assert eight_bit.seconds(decode) < one.seconds(decode)


def test_every_card_and_model_is_usable_and_says_where_it_is_from() -> None:
    names = {card.name for card in known_hardware()}
    for wanted in ("A100", "H100", "H200", "L4", "L40S", "4090", "PRO-6000", "MI300X", "CPU"):
        assert any(wanted in name for name in names), wanted
    for wanted in ("A10G", "T4", "H20", "B200", "RTX-3090", "RTX-5090", "Xeon-8480+", "EPYC-9654"):
        assert wanted in names
    small = ModelShape.named("SmolLM2-135M")
    for card in known_hardware():
        assert len(card.source) > 20
        assert 0 < RooflineStepTimes(card, small).seconds(plan((0, 100))) < 1.0
    assert all(model.source for model in known_models())


def test_published_sizes() -> None:
    # parameters of the matrices, from the models' own cards: 8.03 B and 32.8 B
    for name, billions in (("Llama-3.1-8B", 8.03), ("Qwen3-32B", 32.8)):
        model = ModelShape.named(name)
        total = model.num_layers * model.layer_parameters + 2 * model.vocab_size * model.hidden_size
        assert total / 1e9 == pytest.approx(billions, rel=0.01)


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ConfigError, match="no card for hardware 'x'; known: A100-80GB"):
        HardwareCard.named("x")
    with pytest.raises(ConfigError, match="no shape is known for model 'x'"):
        ModelShape.named("x")
    with pytest.raises(ConfigError, match=r"Llama-3.1-70B needs 1\d\d.\d GiB .* 1 x H100"):
        RooflineStepTimes(HardwareCard.named("H100-SXM"), ModelShape.named("Llama-3.1-70B"))
    with pytest.raises(ConfigError, match="no link"):
        RooflineStepTimes(replace(CARD, link_bandwidth=0.0), MODEL, degree=2)


def test_experts_are_read_as_far_as_they_are_reached() -> None:
    moe = replace(MODEL, num_experts=8, experts_per_token=2, expert_intermediate_size=64)
    times = RooflineStepTimes(CARD, moe)
    none = replace(moe, num_experts=0, experts_per_token=0, intermediate_size=2 * 64)
    # one token reads two of the experts, which are as large together as one layer of that width
    router = 2.0 * moe.num_layers * moe.hidden_size * 8 / CARD.bandwidth
    alone = RooflineStepTimes(CARD, none).seconds(plan((10, 1)))
    assert times.seconds(plan((10, 1))) == pytest.approx(alone + router, rel=1e-6)
    # many read all of them
    more = times.seconds(plan(*[(10, 1)] * 64)) - times.seconds(plan((10, 1)))
    read = 2.0 * moe.num_layers * 6 * moe.expert_parameters / CARD.bandwidth
    assert more >= read
