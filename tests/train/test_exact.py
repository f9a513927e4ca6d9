"""A transformers model with the server's arithmetic: logits and logprobs with `==`, gradients, and what is refused."""

from __future__ import annotations

import copy
import inspect
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, GPTJConfig, GPTJForCausalLM

from tests.models.driver import cache_argument
from tests.tiny_models import tiny_config, write_checkpoint
from tests.train.references import cosine
from tests.train.test_policy import DTYPES, rollouts, weights
from tokserve import ops
from tokserve.train import PolicyModel, exact, selective_logprobs

DEMO = Path("tokserve/demo_model")


def model_of(directory: Path, dtype: str, *, served: str | None = None, **options: Any) -> Any:
    """An exact model with weights in `dtype`, for a server in `served`."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=getattr(torch, dtype))
    assert exact(model, dtype=served, **options) is model
    return model


def padded(rows: list[list[int]], side: str) -> tuple[Tensor, Tensor]:
    """Ids and mask, with ids of the vocabulary at padding."""
    length = max(len(row) for row in rows) + 3
    ids, mask = torch.full((len(rows), length), 7), torch.zeros(len(rows), length, dtype=torch.long)
    for number, row in enumerate(rows):
        first = length - len(row) if side == "left" else 0
        ids[number, first : first + len(row)] = torch.tensor(row)
        mask[number, first : first + len(row)] = 1
    return ids, mask


def scored(values: Tensor, mask: Tensor) -> list[Tensor]:
    """The values of each row's real tokens after the first, from values [B, L - 1] of tokens 1 .. L - 1."""
    both = (mask[:, 1:] * mask[:, :-1]).bool()
    return [row[real] for row, real in zip(values, both, strict=True)]


def assert_equal(model: Any, rows: list[list[int]], expected: list[Tensor], **options: Any) -> None:
    for side in ("left", "right"):
        ids, mask = padded(rows, side)
        logits = model(ids, attention_mask=mask).logits
        assert logits.dtype == torch.float32
        actual = scored(selective_logprobs(logits[:, :-1], ids[:, 1:], **options), mask)
        assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))


@pytest.mark.some(2)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", pytest.param("float16", marks=pytest.mark.slow)])
def test_logprobs_are_the_servers(family: Path, dtype: str) -> None:
    policy = PolicyModel.from_pretrained(family, dtype=dtype)
    model = model_of(family, "float32", served=dtype)
    rows = rollouts()
    starts = [1] * len(rows)
    assert_equal(model, rows, policy.logprobs(rows, starts))
    for mode, temperature in (("temperature", 0.7), ("processed", 0.7), ("processed", 2.0**-9), ("raw", 0.7)):
        expected = policy.logprobs(rows, starts, temperature, mode)
        assert_equal(model, rows, expected, temperature=temperature, logprobs_mode=mode)
        actual = model.logprobs(rows, starts, temperature, mode)
        assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))


def test_weights_in_bfloat16(family: Path) -> None:
    model = model_of(family, "bfloat16")
    model.save_pretrained(family / "saved")
    policy = PolicyModel.from_pretrained(family / "saved", dtype="bfloat16")
    assert_equal(model, rollouts(), policy.logprobs(rollouts(), [1] * len(rollouts())))


def test_masks_of_the_draws() -> None:
    model, policy = (
        model_of(Path("tokserve/demo_model"), "float32"),
        PolicyModel.from_pretrained("demo", dtype="float32"),
    )
    row = [5, 6, 7, 8, 9]
    masks = [[6, 1, 3], None, [8, 8, 2], [9]]
    (expected,) = policy.logprobs([row], [1], 0.5, "processed", [masks])
    ids = torch.tensor([row])
    logits = model(ids).logits
    actual = selective_logprobs(logits[0, :-1], ids[0, 1:], 0.5, "processed", masks)
    assert torch.equal(actual, expected)
    assert actual[3] == 0.0
    with pytest.raises(ValueError, match=r"sampling_masks\[1\] must hold ids"):
        selective_logprobs(logits[0, :-1], ids[0, 1:], 0.5, "processed", [None, [1], None, None])


@DTYPES
@pytest.mark.filterwarnings("ignore:.*checkpointing.*:FutureWarning")
@pytest.mark.parametrize("checkpointing", [False, True])
def test_gradients(dtype: str, checkpointing: bool, tmp_path: Path) -> None:
    hf = tiny_config("qwen3", tie_word_embeddings=True)
    model = model_of(write_checkpoint(tmp_path, hf), "float32", served=dtype).train()
    reference = PolicyModel.from_pretrained(tmp_path, dtype=dtype)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    rows = rollouts()
    ids, mask = padded(rows, "left")
    actual = scored(selective_logprobs(model(ids, attention_mask=mask).logits[:, :-1], ids[:, 1:], 0.8), mask)
    expected = reference.logprobs(rows, [1] * len(rows), 0.8, "temperature")
    for values in (actual, expected):
        torch.stack([(row * weights(row)).sum() for row in values]).sum().backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    for name, master in reference.named_parameters():
        assert gradients[name].dtype == torch.float32
        assert cosine(gradients[name], master.grad) > (0.99999 if dtype == "float32" else 0.99), name  # type: ignore[arg-type]


@pytest.mark.some(3)
@DTYPES
def test_the_loss_and_its_gradients_are_near_to_transformers(family: Path, dtype: str) -> None:
    ids, mask = padded(rollouts(), "right")
    labels = ids.masked_fill(mask == 0, -100)
    plain = AutoModelForCausalLM.from_pretrained(family, dtype=getattr(torch, dtype))
    model = exact(copy.deepcopy(plain))
    for one in (plain, model):
        one(ids, attention_mask=mask, labels=labels).loss.backward()
    kept, other = (torch.cat([p.grad.flatten() for p in one.parameters()]) for one in (plain, model))
    assert other.dtype == kept.dtype == plain.dtype
    assert cosine(other, kept) > (0.99999 if dtype == "float32" else 0.995)


def test_a_step_of_an_optimizer_is_noticed_and_what_is_written_through_data() -> None:
    model = model_of(Path("tokserve/demo_model"), "float32", served="bfloat16")
    ids = torch.tensor([[5, 6, 7, 8]])
    seen = [model(ids).logits]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model(ids, labels=ids).loss.backward()
    optimizer.step()
    seen.append(model(ids).logits)
    model.model.norm.weight.data.mul_(1.5)
    seen.append(model(ids).logits)
    model.lm_head.weight.data[3] += 0.5
    seen.append(model(ids).logits)
    assert all(not torch.equal(one, other) for number, one in enumerate(seen) for other in seen[:number])
    fresh = exact(copy.deepcopy(model), dtype="bfloat16")
    assert torch.equal(fresh(ids).logits, seen[-1])


def test_packed_rows_and_positions() -> None:
    model = model_of(Path("tokserve/demo_model"), "bfloat16")
    one, other = [5, 6, 7, 8, 9], [11, 12, 13]
    alone = [model(torch.tensor([row])).logits[0] for row in (one, other)]
    packed = model(torch.tensor([one + other]), position_ids=torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2]])).logits[0]
    assert torch.equal(packed, torch.cat(alone))
    ids, mask = padded([one, other], "left")
    position_ids = (mask.cumsum(1) - 1).clamp(min=0)
    shifted = torch.arange(ids.shape[1])[None]
    expected = model(ids, attention_mask=mask).logits
    assert torch.equal(expected[1, -3:], alone[1])
    assert not expected[1, :-3].any()
    for positions in (position_ids, shifted):
        assert torch.equal(model(ids, attention_mask=mask, position_ids=positions).logits, expected)
    hole = torch.tensor([[1, 1, 0, 1, 1, 1]])
    ids = torch.tensor([[5, 6, 0, 7, 8, 9]])
    actual = model(ids, attention_mask=hole, position_ids=(hole.cumsum(1) - 1)).logits[0]
    assert torch.equal(actual[hole[0].bool()], alone[0])
    with pytest.raises(ValueError, match=r"attention_mask\[0\] hides a token between two others"):
        model(ids, attention_mask=hole)
    with pytest.raises(ValueError, match=r"position_ids\[0\]\[4\] must follow"):
        model(ids, position_ids=torch.tensor([[0, 1, 2, 3, 7, 8]]))


def test_an_exact_model_keeps_its_class_and_interface(tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path / "a", tiny_config("qwen2"))
    plain = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    kind, names = type(plain), [name for name, _ in plain.named_parameters()]
    signature = inspect.signature(plain.forward)
    model = exact(plain)
    assert isinstance(model, kind)
    assert type(model).__name__ == kind.__name__
    assert inspect.signature(model.forward) == signature
    assert [name for name, _ in model.named_parameters()] == names
    assert model.lm_head.weight is model.model.embed_tokens.weight
    model.save_pretrained(tmp_path / "b")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "b", dtype=torch.float32)
    assert type(again) is kind
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))
    ids = torch.tensor([[5, 6, 7, 8]])
    expected = model(ids).logits
    assert torch.equal(exact(exact(model)).eval()(ids).logits, expected)
    assert torch.equal(model.train()(ids).logits, expected)
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(copied(ids).logits, expected)
        with torch.no_grad():
            copied.model.norm.weight.mul_(2.0)
        assert not torch.equal(copied(ids).logits, expected)
        assert torch.equal(model(ids).logits, expected)
    model.load_state_dict({name: 0.5 * value for name, value in model.state_dict().items()})
    assert not torch.equal(model(ids).logits, expected)


def test_outputs_of_transformers() -> None:
    plain = AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32)
    model = exact(copy.deepcopy(plain))
    ids = torch.tensor([[5, 6, 7, 8], [9, 10, 11, 12]])
    expected, actual = (one(ids, output_hidden_states=True) for one in (plain, model))
    assert len(actual.hidden_states) == len(expected.hidden_states)
    for a, b in zip(actual.hidden_states, expected.hidden_states, strict=True):
        assert (a - b).abs().max() < 1e-3
    assert torch.equal(model(ids, logits_to_keep=2).logits, actual.logits[:, -2:])
    assert torch.equal(model(ids, return_dict=False)[0], actual.logits)
    assert torch.equal(model.model(ids).last_hidden_state, actual.hidden_states[-1])
    assert not model(torch.tensor([[5, 6]]), attention_mask=torch.zeros(1, 2)).logits.any()
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(model(ids).logits, actual.logits)


def test_a_gradient_that_is_the_same_number_everywhere() -> None:
    """That of a sum has no rows in memory."""
    model, other = (model_of(DEMO, "float32") for _ in range(2))
    ids = torch.tensor([[3, 4, 5, 6]])
    model(ids).logits.sum().backward()
    (other(ids).logits * torch.ones(1, 4, 1)).sum().backward()
    for one, same in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(one.grad, same.grad) and one.grad.any()


def test_an_empty_batch() -> None:
    model = model_of(DEMO, "float32")
    vocab = model.config.vocab_size
    for shape in ((0, 5), (2, 0)):
        logits = model(torch.zeros(shape, dtype=torch.long), output_hidden_states=True).logits
        assert logits.shape == (*shape, vocab) and logits.dtype == torch.float32


def test_generate() -> None:
    plain = AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32)
    model = exact(copy.deepcopy(plain))
    ids, mask = padded([[5, 6, 7, 8, 9], [10, 11]], "left")
    options = {"attention_mask": mask, "max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(model.generate(ids, **options), plain.generate(ids, **options))


def test_selective_logprobs_have_a_gradient() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = (4.0 * torch.randn(3, 5, 320, generator=generator)).requires_grad_()
    ids = torch.randint(0, 320, (3, 5), generator=generator)
    temperatures = torch.tensor([0.5, 1.0, 2.0])[:, None]
    for mode in ("raw", "temperature", "processed"):
        (actual,) = torch.autograd.grad(selective_logprobs(logits, ids, temperatures, mode).square().sum(), logits)
        wide = logits.detach().double().requires_grad_()
        rows = (wide / (1.0 if mode == "raw" else temperatures[..., None])).log_softmax(-1)
        rows.gather(-1, ids[..., None]).square().sum().backward()
        assert wide.grad is not None  # up to 80, in float32
        assert (actual - wide.grad).abs().max() < 1e-6 * wide.grad.abs().max()
    with pytest.raises(ValueError, match="logits must be float32"):
        selective_logprobs(logits.bfloat16(), ids)
    with pytest.raises(ValueError, match="token_ids must have the shape"):
        selective_logprobs(logits, ids[:, :-1])
    with pytest.raises(ValueError, match="outside the vocabulary"):
        selective_logprobs(logits, ids + 320)


def ends(*numbers: int) -> dict[str, Any]:
    """The arguments with which flash attention takes a row of sequences."""
    numbers_of_both = torch.tensor(numbers, dtype=torch.int32)
    return {"cu_seq_lens_q": numbers_of_both, "cu_seq_lens_k": numbers_of_both.clone(), "max_length_q": 5}


def test_a_packed_row_is_its_sequences_also_by_their_ends() -> None:
    """Their ends are enough, and positions that say the same may come too (rl-faults F16)."""
    model = model_of(DEMO, "float32")
    rows = [[5, 6, 7], [9, 8, 7, 6, 5], [4, 3]]
    alone = torch.cat([model(torch.tensor([row])).logits[0] for row in rows])
    ids = torch.tensor([[*rows[0], *rows[1], *rows[2]]])
    positions = torch.cat([torch.arange(len(row)) for row in rows])[None]
    for packed in (ends(0, 3, 8, 10), ends(0, 3, 8, 10) | {"position_ids": positions}, {"position_ids": positions}):
        assert torch.equal(model(ids, **packed).logits[0], alone)
    assert torch.equal(model(ids, **ends(0, 10)).logits, model(ids).logits)
    wrong: list[tuple[dict[str, Any], str]] = [
        (ends(0, 3, 9), "must rise from 0 to the row's 10 tokens"),
        (ends(0, 3, 3, 10), "must rise from 0"),
        (ends(1, 10), "must rise from 0"),
        (ends(0), "must rise from 0"),
        (ends(0, 4, 8, 10) | {"position_ids": positions}, r"position_ids begin sequences at \[3, 8\]"),
        (ends(0, 3, 10) | {"cu_seq_lens_k": torch.tensor([0, 4, 10])}, "be the same"),
        ({"cu_seq_lens_k": torch.tensor([0, 10])}, "given together"),
        (ends(0, 10) | {"attention_mask": torch.ones(1, 10)}, "one row without attention_mask"),
    ]
    for packed, message in wrong:
        with pytest.raises(ValueError, match=message):
            model(ids, **packed)


def test_no_argument_is_ignored_that_would_change_the_result() -> None:
    model = model_of(DEMO, "float32")
    ids = torch.tensor([[5, 6, 7, 8]])
    expected = model(ids).logits
    without_effect: dict[str, Any] = {
        "is_causal": True,
        "output_attentions": False,
        "output_router_logits": None,
        "return_dict": True,
        "use_cache": False,
        "num_items_in_batch": torch.tensor(3),
        "something": None,
    }
    assert torch.equal(model(ids, **without_effect).logits, expected)
    for option in ({"is_causal": False}, {"seq_idx": ids}, {"token_type_ids": ids}, {"atention_mask": ids}):
        with pytest.raises(ValueError, match=f"{next(iter(option))} is not supported by an exact model"):
            model(ids, **option)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("way", ["wrapped", "in_place"])
def test_a_compiled_model_has_the_same_bits(way: str) -> None:
    """Its forward pass is not compiled: a compiler reorders sums (rl-faults F8)."""
    model, policy = model_of(DEMO, "float32"), PolicyModel.from_pretrained("demo", dtype="float32")
    rows = [[5, 6, 7, 8], [5, 6, 9]]
    ids, mask = padded(rows, "left")

    def results(exact_model: Any, trained: Any) -> list[Tensor]:
        for module in (model, policy):
            module.zero_grad()
        logits = exact_model(ids, attention_mask=mask).logits
        rows_of_policy = trained(rows, [1, 1])
        (logits.logsumexp(-1).sum() + torch.cat(rows_of_policy).sum()).backward()
        gradients = [module.get_parameter("model.norm.weight").grad for module in (model, policy)]
        return [logits.detach(), *(row.detach() for row in rows_of_policy), *(grad.clone() for grad in gradients)]

    expected = results(model, policy)
    if way == "wrapped":
        actual = results(torch.compile(model, backend="eager"), torch.compile(policy, backend="eager"))
    else:
        for module in (model, policy):
            module.compile(backend="eager")
        actual = results(model, policy)
    assert all(torch.equal(one, other) for one, other in zip(actual, expected, strict=True))


def test_what_is_refused_is_named(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="Linear"):
        exact(nn.Linear(2, 2))
    with pytest.raises(ValueError, match="architecture GPTJForCausalLM is not supported; supported are: "):
        exact(GPTJForCausalLM(GPTJConfig(n_layer=1, n_embd=8, n_head=2, rotary_dim=4, vocab_size=16)))
    directory = write_checkpoint(tmp_path, tiny_config("llama"))
    with pytest.raises(ValueError, match="LlamaForSequenceClassification"):
        exact(AutoModelForSequenceClassification.from_pretrained(directory))
    dropping = AutoModelForCausalLM.from_pretrained(directory, attention_dropout=0.1)
    with pytest.raises(ValueError, match=r"attention_dropout is 0.1"):
        exact(dropping)
    for dtype in ("int8", torch.float64):
        with pytest.raises(ValueError, match="dtype must be one of"):
            exact(AutoModelForCausalLM.from_pretrained(directory), dtype=dtype)
    quantized = AutoModelForCausalLM.from_pretrained(directory)
    quantized.config.quantization_config = {"quant_method": "fp8"}
    with pytest.raises(ValueError, match="quantized"):
        exact(quantized)
    model = model_of(directory, "float32")
    ids = torch.tensor([[5, 6, 7]])
    for option in ({"use_cache": True}, {"output_attentions": True}, {cache_argument(model): object()}):
        with pytest.raises(ValueError, match=f"{next(iter(option))} is not supported"):
            model(ids, **option)
    with pytest.raises(ValueError, match="inputs_embeds"):
        model(inputs_embeds=torch.zeros(1, 3, 64))
    with pytest.raises(ValueError, match=r"input_ids\[0\] holds an id outside the vocabulary"):
        model(torch.tensor([[5, 400]]))
    with pytest.raises(ValueError, match="attention_mask must have the shape"):
        model(ids, attention_mask=torch.ones(1, 1, 3, 3))
    model.lm_head = nn.Linear(64, 320, bias=False)
    with pytest.raises(TypeError, match="call exact again"):
        model(ids)
    projection = model.model.layers[1].mlp.up_proj
    projection.weight = nn.Parameter(projection.weight.detach().to(torch.int8), requires_grad=False)
    with pytest.raises(TypeError, match=r"model.layers.1.mlp.up_proj.weight is torch.int8"):
        model.model(ids)


def test_ops_that_were_bound_since_are_replaced() -> None:
    model = model_of(Path("tokserve/demo_model"), "bfloat16")
    ids = torch.tensor([[5, 6, 7, 8]])
    before = model(ids).logits
    ops.bind("cpu", {"*": "torch"})
    assert torch.equal(model(ids).logits, before)
