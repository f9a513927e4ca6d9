"""Draft heads of checkpoints: their drafts are those of an oracle, and change no bit of an output."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.functional import silu
from transformers import AutoModelForCausalLM
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from tests.runner.drive import Driver, Job, feature, make_runner, plan_of, update
from tests.runner.fake_device import FakeDevice
from tests.runner.test_hybrids import engine_of
from tests.runner.test_hybrids import run as run_engine
from tests.runner.test_runner import jobs, outcomes, prompt
from tests.runner.test_weight_sync import by_stream
from tests.tiny_models import tiny_config, tiny_vision_config, write_checkpoint
from tokserve.base.errors import RequestError, StartError
from tokserve.checkpoint import flat
from tokserve.config import Config
from tokserve.features.draft_heads.head_drafts import HeadDrafts
from tokserve.features.draft_heads.names import head_of
from tokserve.features.draft_heads.served import with_draft_head
from tokserve.layers.options import LayerOptions
from tokserve.models.decoder import rope_tables
from tokserve.models.dummy import tensors
from tokserve.models.registry import decoder_spec
from tokserve.protocol.params import HiddenStateChoice, SamplingParams
from tokserve.protocol.plan import DRAWN, DeviceFacts, NewRow
from tokserve.runner import device
from tokserve.runner.runner import Runner

VOCAB = 320
HYBRID = {"layer_types": ["linear_attention", "linear_attention", "full_attention"]}
FAMILIES: dict[str, dict[str, Any]] = {  # and changes of their tiny configs
    "qwen3_5_text": HYBRID,
    "qwen3_next": HYBRID | {"mlp_only_layers": []},
    "deepseek_v3": {},
    "glm4_moe": {},
    "glm4_moe_lite": {},
}
MTP = {"spec_method": "mtp"}


def eagle3(directory: Path) -> dict[str, Any]:
    """Options for a head of this checkpoint."""
    return {"speculative_config": {"method": "eagle3", "model": str(directory)}}


def write_model(directory: Path, family: str, seed: int = 0) -> dict[str, Any]:
    """A tiny checkpoint with a draft head; its config.json."""
    hf = tiny_config(family, **FAMILIES[family])
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(hf))
    config = Config.make(model=str(directory), **MTP)
    spec = with_draft_head(config, hf, decoder_spec(flat(hf)), None)
    options = LayerOptions(torch.float32)
    parameters = spec.build(options, options, rope_tables(spec, 1)).parameters_by_name()
    save_file(dict(tensors(parameters, seed)), directory / "model.safetensors", metadata={"format": "pt"})
    return hf


class Oracle:
    """A model and its draft head in transformers' modules, computed whole for every token."""

    def __init__(self, directory: Path, hf: dict[str, Any]) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(directory, attn_implementation="eager", dtype=torch.float32)
        head, _ = head_of(hf, decoder_spec(flat(hf)))
        self._names, self._repeats_normed = head.names, head.repeats_normed
        self._weights = load_file(directory / "model.safetensors")
        base = self.model.model
        self._block = type(base.layers[-1])(base.config, len(base.layers) - 1)
        self._block.load_state_dict(self._of_block(self._block))
        self._block.eval()

    def _of_block(self, block: nn.Module) -> dict[str, Tensor]:
        """The block's tensors under transformers' names, which have all experts in one."""
        prefix = f"{self._names.block}."
        named = {k.removeprefix(prefix): v for k, v in self._weights.items() if k.startswith(prefix)}
        state = {}
        for name, expected in block.state_dict().items():
            module, _, last = name.rpartition(".")
            if name in named:
                state[name] = named[name]
            elif last == "gate_up_proj":
                experts = [f"{module}.{i}" for i in range(len(expected))]
                parts = [torch.cat([named[f"{one}.{p}_proj.weight"] for p in ("gate", "up")]) for one in experts]
                state[name] = torch.stack(parts)
            else:
                state[name] = torch.stack([named[f"{module}.{i}.{last}.weight"] for i in range(len(expected))])
        return state

    def _norm(self, name: str, x: Tensor) -> Tensor:
        norm = type(self.model.model.norm)(x.shape[-1], eps=1e-6)
        norm.weight.data = self._weights[f"{name}.weight"]
        return norm(x)

    @torch.no_grad()
    def drafts(self, tokens: list[int], count: int) -> list[int]:
        """The greedy drafts after these tokens, the last of which the model has not computed."""
        base, names = self.model.model, self._names
        ids, drawn = tokens[1:], list[int]()
        states = base(torch.tensor([tokens[:-1]])).last_hidden_state
        for _ in range(count):
            length = states.shape[1]
            embedded = self._norm(names.embedding_norm, base.embed_tokens(torch.tensor([ids])))
            joined = torch.cat([embedded, self._norm(names.state_norm, states)], -1)
            x = joined @ self._weights[f"{names.projection}.weight"].T
            positions = torch.arange(length)[None]
            mask = torch.full((length, length), float("-inf")).triu(1)[None, None]
            rope = base.rotary_emb(x, positions)
            x = self._block(x, position_embeddings=rope, attention_mask=mask, position_ids=positions)
            x = x[0] if isinstance(x, tuple) else x
            normed = self._norm(names.norm, x)
            drawn.append(int(self.model.lm_head(normed)[0, -1].argmax()))
            repeated = normed if self._repeats_normed else x
            states, ids = torch.cat([states, repeated[:, -1:]], 1), [*ids, drawn[-1]]
        return drawn


DRAWN_VOCAB = 200  # of the EAGLE head


def write_eagle(directory: Path, seed: int = 0, **changes: Any) -> Path:
    """A tiny EAGLE-3 checkpoint for tiny models of the family llama."""
    generator = torch.Generator().manual_seed(seed)

    def weight(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator) / shape[-1] ** 0.5

    hf = tiny_config("llama", num_hidden_layers=1, intermediate_size=96) | {"draft_vocab_size": DRAWN_VOCAB} | changes
    ids = torch.randperm(VOCAB, generator=generator)[:DRAWN_VOCAB].sort().values
    named = {
        "fc.weight": weight(64, 3 * 64),
        "norm.weight": 1 + 0.1 * torch.randn(64, generator=generator),
        "lm_head.weight": weight(DRAWN_VOCAB, 64) * 3,
        "d2t": ids - torch.arange(DRAWN_VOCAB),
        "t2d": torch.zeros(VOCAB, dtype=torch.bool).index_fill_(0, ids, True),
    }
    for name, shape in {"q": (64, 128), "k": (32, 128), "v": (32, 128), "o": (64, 64)}.items():
        named[f"midlayer.self_attn.{name}_proj.weight"] = weight(*shape)
    for name, shape in {"gate": (96, 64), "up": (96, 64), "down": (64, 96)}.items():
        named[f"midlayer.mlp.{name}_proj.weight"] = weight(*shape)
    for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm"):
        named[f"midlayer.{name}.weight"] = 1 + 0.1 * torch.randn(64, generator=generator)
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(hf))
    save_file(named, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


class EagleOracle:
    """A model in transformers' modules and an EAGLE-3 head in plain torch, computed whole for every token."""

    def __init__(self, served: Path, eagle: Path) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(served, attn_implementation="eager", dtype=torch.float32)
        stored = load_file(eagle / "model.safetensors").items()
        self._weights = {name.replace("layers.0.", "midlayer."): tensor for name, tensor in stored}
        self._adds_normed = json.loads((eagle / "config.json").read_text()).get("norm_before_residual", False)

    def _times(self, name: str, x: Tensor) -> Tensor:
        return x @ self._weights[f"{name}.weight"].T

    def _norm(self, name: str, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self._weights[f"{name}.weight"]

    @torch.no_grad()
    def drafts(self, tokens: list[int], count: int) -> list[int]:
        """The greedy drafts after these tokens, the last of which the model has not computed."""
        base = self.model.model
        ids, drawn = tokens[1:], list[int]()
        streams = base(torch.tensor([tokens[:-1]]), output_hidden_states=True).hidden_states
        states = self._times("fc", torch.cat([streams[number] for number in (2, 1, 0)], -1))
        for _ in range(count):
            length = states.shape[1]
            embedded = self._norm("midlayer.input_layernorm", base.embed_tokens(torch.tensor([ids])))
            normed = self._norm("midlayer.hidden_norm", states)
            joined = torch.cat([embedded, normed], -1)
            q, k, v = (self._times(f"midlayer.self_attn.{name}_proj", joined) for name in "qkv")
            q, k, v = (x.view(1, length, -1, 16).transpose(1, 2) for x in (q, k, v))
            q, k = apply_rotary_pos_emb(q, k, *base.rotary_emb(joined, torch.arange(length)[None]))
            k, v = (x.repeat_interleave(2, dim=1) for x in (k, v))
            scores = q @ k.transpose(2, 3) / 4 + torch.full((length, length), float("-inf")).triu(1)
            mixed = (scores.softmax(-1) @ v).transpose(1, 2).reshape(1, length, 64)
            residual = normed if self._adds_normed else states
            residual = residual + self._times("midlayer.self_attn.o_proj", mixed)
            x = self._norm("midlayer.post_attention_layernorm", residual)
            gated = silu(self._times("midlayer.mlp.gate_proj", x)) * self._times("midlayer.mlp.up_proj", x)
            residual = residual + self._times("midlayer.mlp.down_proj", gated)
            chosen = int(self._times("lm_head", self._norm("norm", residual))[0, -1].argmax())
            drawn.append(chosen + int(self._weights["d2t"][chosen]))
            states, ids = torch.cat([states, residual[:, -1:]], 1), [*ids, drawn[-1]]
        return drawn


Loaded = tuple[Runner, DeviceFacts]


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Loaded]:
    """Runners by family, with the draft head or without drafts, each made once."""
    cache: dict[tuple[str, bool, str, str], Loaded] = {}
    root = tmp_path_factory.mktemp("models")

    def get(family: str, *, drafts: bool = True, dtype: str = "float32", backend: str = "host") -> Loaded:
        key = family, drafts, dtype, backend
        if key not in cache:
            if family == "llama":
                hf = tiny_config(family)
                write_checkpoint(root / family, hf)
                drafting: dict[str, Any] = eagle3(write_eagle(root / "eagle"))
            else:
                hf, drafting = write_model(root / family, family), MTP
            options = {"load_format": "auto", "dtype": dtype} | (drafting if drafts else {})
            with pytest.MonkeyPatch.context() as patch:
                if backend == "cuda":
                    patch.setattr(device, "use", lambda kind: FakeDevice())
                cache[key] = make_runner(root / family, hf, depth=2, **options)
        return cache[key]

    return get


def enter(
    runner: Runner, slot: int, tokens: list[int], blocks: list[int], computed: int = 0, temperature: float = 0.0
) -> int:
    """Compute all of a slot's prompt from `computed` on; the first token."""
    params = SamplingParams(temperature=temperature)
    row = NewRow(slot, "", np.array(tokens, np.int32), len(tokens), params, 7, ())
    count = len(tokens) - computed
    plan = plan_of([(slot, computed, count, 1)], new=[row], blocks=[(slot, 0, blocks)])
    return int(runner.execute(plan).token_ids[0])


def drawn_for(runner: Runner, slot: int, computed: int, count: int) -> tuple[list[int], list[int]]:
    """A step of a slot with so many drawn drafts: the drafts, and its tokens."""
    step = runner.forward(plan_of([(slot, computed, count + 1, count + 1)], 0, [[DRAWN] * count]))
    drafts = step.plan.draft_token_ids.tolist()
    return drafts, runner.sample(step, None).result().token_ids.tolist()


@pytest.mark.parametrize(
    ("family", "backend"),
    [
        ("qwen3_5_text", "host"),
        ("qwen3_5_text", "cuda"),
        *(pytest.param(name, "host", marks=pytest.mark.slow) for name in FAMILIES if name != "qwen3_5_text"),
    ],
)
def test_drafts_are_those_of_transformers_modules(
    family: str, backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hf = write_model(tmp_path, family)
    oracle = Oracle(tmp_path, hf)
    if backend == "cuda":
        monkeypatch.setattr(device, "use", lambda kind: FakeDevice())
    runner, _ = make_runner(tmp_path, hf, load_format="auto", **MTP)
    tokens = prompt(45, 3)
    tokens.append(enter(runner, 0, tokens, [0, 1, 2, 3, 4]))
    for count in (1, 3, 2, 4, 1):
        drafts, sampled = drawn_for(runner, 0, len(tokens) - 1, count)
        assert drafts == oracle.drafts(tokens, count)
        tokens += sampled
    runner.execute(plan_of([], freed=[0]))


def test_hidden_states_are_the_same_with_a_draft_head(tmp_path: Path) -> None:
    served = {"qwen3_5_text": write_model(tmp_path / "qwen3_5_text", "qwen3_5_text"), "llama": tiny_config("llama")}
    write_checkpoint(tmp_path / "llama", served["llama"])
    chosen = HiddenStateChoice(layers=[0, 1, 3], positions=[0, 7, 40, 44])
    task = SamplingParams(temperature=0.0, hidden_states=chosen)
    tokens = prompt(45, 3)
    for family, drafting in (("qwen3_5_text", MTP), ("llama", eagle3(write_eagle(tmp_path / "eagle")))):
        states = []
        for options in ({}, drafting):
            options = {"load_format": "auto", "max_hidden_state_bytes": 1 << 20} | options
            runner, _ = make_runner(tmp_path / family, served[family], **options)
            row = NewRow(0, "", np.array(tokens, np.int32), len(tokens), task, 7, ())
            plan = plan_of([(0, 0, len(tokens), 1)], new=[row], blocks=[(0, 0, [0, 1, 2, 3, 4])])
            states.append(runner.execute(plan).values["hidden_states"][0])
        assert states[0].shape == (4, 3, served[family]["hidden_size"]) and np.array_equal(*states)


def as_speculators_writes(eagle: Path) -> None:
    """The same head in the form of the library speculators, which begins the residual stream with the normed state."""
    hf = json.loads((eagle / "config.json").read_text())
    outer = {"draft_vocab_size": hf.pop("draft_vocab_size"), "norm_before_residual": True}
    (eagle / "config.json").write_text(json.dumps(outer | {"transformer_layer_config": hf}))
    named = load_file(eagle / "model.safetensors").items()
    renamed = {name.replace("midlayer.", "layers.0."): tensor.clone() for name, tensor in named}
    save_file(renamed, eagle / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("form", ["eagle", "speculators"])
def test_drafts_of_an_eagle_head_are_those_of_an_oracle(form: str, tmp_path: Path) -> None:
    hf = tiny_config("llama")
    served, eagle = write_checkpoint(tmp_path / "served", hf), write_eagle(tmp_path / "eagle")
    if form == "speculators":
        as_speculators_writes(eagle)
    oracle = EagleOracle(served, eagle)
    runner, _ = make_runner(served, hf, load_format="auto", **eagle3(eagle))
    tokens = prompt(45, 3)
    tokens.append(enter(runner, 0, tokens, [0, 1, 2, 3, 4]))
    for count in (1, 3, 2, 4, 1):
        drafts, sampled = drawn_for(runner, 0, len(tokens) - 1, count)
        assert drafts == oracle.drafts(tokens, count)
        tokens += sampled


def test_a_shared_prefix_has_its_states(loaded: Callable[..., Loaded], tmp_path: Path) -> None:
    runner, _ = loaded("deepseek_v3")
    hf = write_model(tmp_path, "deepseek_v3")
    oracle = Oracle(tmp_path, hf)
    first, second = prompt(40, 5), [*prompt(40, 5)[:32], *prompt(9, 6)]
    first.append(enter(runner, 0, first, [0, 1, 2]))
    assert drawn_for(runner, 0, 40, 3)[0] == oracle.drafts(first, 3)
    assert runner.backend.draft is not None
    drawing = feature(runner, HeadDrafts)
    second.append(enter(runner, 1, second, [0, 1, 5], computed=32))
    step = runner.forward(plan_of([(1, 41, 3, 3)], 0, [[DRAWN] * 2]))
    passes = step.draft_passes
    assert passes is not None and passes.num_tokens == (41 - 32) + 1, "the prefix is not computed again"
    assert drawing.progress is not None
    runner.sample(step, None).result()
    runner.execute(plan_of([], freed=[0, 1]))


def test_drafts_have_the_noise_of_their_positions_on_every_device(loaded: Callable[..., Loaded]) -> None:
    drawn = []
    for backend in ("host", "cuda"):
        runner, _ = loaded("qwen3_5_text", backend=backend)
        tokens = prompt(30, 8)
        tokens.append(enter(runner, 0, tokens, [0, 1, 2, 3], temperature=1.0))
        steps = []
        for count in (3, 1, 4):
            steps.append(drawn_for(runner, 0, len(tokens) - 1, count))
            tokens += steps[-1][1]
        runner.execute(plan_of([], freed=[0]))
        drawn.append(steps)
    assert drawn[0] == drawn[1]


def some_drawn(seed: int) -> Callable[[Job], list[int]]:
    """Up to five drafts for a request that generates."""
    rng = random.Random(seed)
    return lambda job: [DRAWN] * rng.randrange(6) if job.output else []


@pytest.mark.parametrize(
    ("family", "dtype", "backend"),
    [
        ("qwen3_5_text", "float32", "host"),
        ("llama", "bfloat16", "host"),
        ("qwen3_5_text", "float32", "cuda"),
        pytest.param("llama", "float32", "cuda", marks=pytest.mark.slow),
        pytest.param("deepseek_v3", "bfloat16", "host", marks=pytest.mark.slow),
        pytest.param("qwen3_next", "bfloat16", "host", marks=pytest.mark.slow),
    ],
)
def test_drafts_of_a_head_change_no_bit(loaded: Callable[..., Loaded], family: str, dtype: str, backend: str) -> None:
    alone = [Driver(*loaded(family, drafts=False, dtype=dtype, backend=backend)).run([job])[0] for job in jobs()]
    runner, facts = loaded(family, dtype=dtype, backend=backend)
    preempt = {i: 1 + i % 7 for i in range(0, 17, 2)}
    for chunk, options in ((1 << 30, {}), (7, {"preempt_after": preempt})):
        driver = Driver(runner, facts, seed=chunk % 5, drafter=some_drawn(chunk))
        assert outcomes(driver.run(jobs(), chunk=chunk, **options)) == outcomes(alone)  # type: ignore[arg-type]
        assert driver.accepted + driver.rejected > 60


def test_checkpoints_and_options_without_a_head_are_refused(tmp_path: Path) -> None:
    for family, message in (
        ("llama", "is for models with a draft head .* model_type is 'llama'"),
        ("deepseek_v3", r"the checkpoint has no model.layers.3.eh_proj.weight"),
        ("qwen3_5_text", r"the checkpoint has no mtp.fc.weight"),
    ):
        hf = tiny_config(family)
        directory = write_checkpoint(tmp_path / family, hf)
        with pytest.raises(StartError, match=message):
            make_runner(directory, hf, load_format="auto", **MTP)


@pytest.mark.slow
def test_an_engine_with_a_head_preempts_and_shares_prefixes(tmp_path: Path) -> None:
    """A hybrid has snapshots of recurrent states as well; drafts come from the head and from texts."""
    family = "qwen3_5_text"
    known = run_engine(engine_of(tmp_path / "alone", family, max_num_seqs=1, enable_prefix_caching=False), turns=2)
    page = 16 * 2 * (2 * 2 * 16 + 2 * 2 * 16 + 64)  # of keys and values in the model and the head, and of states
    for number, options in enumerate(({}, {"kv_cache_memory_bytes": 9 * page, "state_snapshot_interval": 16})):
        engine = engine_of(tmp_path / f"drafting{number}", family, spec_method="mtp", spec_tokens=4, **options)
        assert run_engine(engine, turns=2) == known
        assert engine.stats.rooms["draft_tokens"] > 50
        assert engine.stats.preemptions or not options


def test_images_beside_a_head(tmp_path: Path) -> None:
    """A model that reads images has rope tables by axis: the head's positions follow them."""
    runner, _ = make_runner(tmp_path, tiny_vision_config("qwen3_5"), **MTP)
    tokens = prompt(30, 4)
    enter(runner, 0, tokens, [0, 1, 2])
    drafts, sampled = drawn_for(runner, 0, 30, 3)
    assert len(drafts) == 3 and sampled
    runner.execute(plan_of([], freed=[0]))


@pytest.mark.slow
@pytest.mark.parametrize(("family", "quantization"), [("glm4_moe", "int8"), ("qwen3_5_text", "int4")])
def test_a_head_is_quantized_with_the_model(family: str, quantization: str, tmp_path: Path) -> None:
    hf = write_model(tmp_path, family)
    options = {"load_format": "auto", "quantization": quantization}
    known = outcomes(Driver(*make_runner(tmp_path, hf, **options)).run(jobs()))
    driver = Driver(*make_runner(tmp_path, hf, **options, **MTP), drafter=some_drawn(5))
    assert outcomes(driver.run(jobs())) == known and driver.accepted + driver.rejected > 60


def test_an_update_may_leave_out_the_head(tmp_path: Path) -> None:
    first, second, mixed = (tmp_path / name for name in ("first", "second", "mixed"))
    hf = write_model(first, "glm4_moe")
    for directory, seed in ((second, 1), (mixed, 1)):
        write_model(directory, "glm4_moe", seed=seed)
    runner, _ = make_runner(first, hf, load_format="auto", **MTP)
    prefix = "model.layers.3."
    old, new = (load_file(directory / "model.safetensors") for directory in (first, second))
    rest = {name: tensor for name, tensor in new.items() if not name.startswith(prefix)}
    kept = {name: tensor for name, tensor in old.items() if name.startswith(prefix)}
    save_file(rest | kept, mixed / "model.safetensors", metadata={"format": "pt"})
    for directory, tensors_of in ((first, None), (mixed, rest), (second, new)):
        if tensors_of is not None:
            update(runner, by_stream, tensors_of)
            runner.call("commit_update", {})
        tokens = prompt(30, 4)
        tokens.append(enter(runner, 0, tokens, [0, 1, 2]))
        assert drawn_for(runner, 0, 30, 3)[0] == Oracle(directory, hf).drafts(tokens, 3)
        runner.execute(plan_of([], freed=[0]))
    del new[f"{prefix}eh_proj.weight"]
    with pytest.raises(RequestError, match=r"not complete: 1 missing: model\.layers\.3\.eh_proj\.weight"):
        update(runner, by_stream, new)


def test_an_update_may_leave_out_the_head_after_weights_were_released_and_an_update_failed(tmp_path: Path) -> None:
    first, mixed = tmp_path / "first", tmp_path / "mixed"
    hf, prefix = write_model(first, "glm4_moe"), "model.layers.3."
    write_model(mixed, "glm4_moe", seed=1)
    runner, _ = make_runner(first, hf, load_format="auto", **MTP)
    old, new = (load_file(directory / "model.safetensors") for directory in (first, mixed))
    rest = {name: tensor for name, tensor in new.items() if not name.startswith(prefix)}
    kept = {name: tensor for name, tensor in old.items() if name.startswith(prefix)}
    save_file(rest | kept, mixed / "model.safetensors", metadata={"format": "pt"})
    runner.admin.release(["weights"])
    with pytest.raises(RequestError, match="not complete: 1 missing"):
        update(runner, by_stream, {name: new[name] for name in new if name != f"{prefix}eh_proj.weight"})
    update(runner, by_stream, rest)
    runner.call("commit_update", {})
    tokens = prompt(30, 4)
    tokens.append(enter(runner, 0, tokens, [0, 1, 2]))
    assert drawn_for(runner, 0, 30, 3)[0] == Oracle(mixed, hf).drafts(tokens, 3)


def test_a_float8_cache_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "use", lambda kind: FakeDevice())
    with pytest.raises(StartError, match="fp8 is not for a draft head's hidden states"):
        make_runner(tmp_path, tiny_config("glm4_moe"), kv_cache_dtype="fp8", **MTP)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": 32}, "has states of 32 elements, and the served model's have 64"),
        ({"vocab_size": 400}, "is for a vocabulary of 400, and the model's has 320"),
        ({"num_hidden_layers": 2}, "must have one layer"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 3]}}, r"reads the states of layers \[0, 1, 3\]"),
        ({"draft_vocab_size": 199}, "lm_head.weight"),
    ],
)
def test_unsuitable_eagle_heads_are_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    eagle = write_eagle(tmp_path / "eagle", **changes)
    with pytest.raises(StartError, match=message):
        make_runner(tmp_path / "served", tiny_config("llama"), **eagle3(eagle))
