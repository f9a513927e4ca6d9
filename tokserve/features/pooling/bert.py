"""Families that read a prompt both ways: BERT, RoBERTa and XLM-RoBERTa, which differ in names and positions, and
ModernBERT, with rotary positions and layers that attend to a window on both sides."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tokserve.checkpoint.architectures import SUFFIX, TOKEN_SUFFIX, encoder_family, first_position
from tokserve.features.pooling import classifier
from tokserve.features.pooling.encoder_model import EncoderSpec
from tokserve.features.pooling.head import EncoderHeadSpec
from tokserve.layers.attention import AttentionSpec
from tokserve.layers.mlp import MLPSpec
from tokserve.layers.norm import NormSpec
from tokserve.layers.rope import NO_ROPE, RopeSpec
from tokserve.models.block import BlockNorms, BlockSpec
from tokserve.models.config_reader import ConfigReader
from tokserve.models.decoder import Renames
from tokserve.models.rope_config import rope_by_type
from tokserve.models.spec import activation, head_size, refuse_unsupported

OLDER = ((".LayerNorm.gamma", ".LayerNorm.weight"), (".LayerNorm.beta", ".LayerNorm.bias"))
PARTS = (  # of BERT's checkpoints, behind a prefix that differs
    ("embeddings.position_ids", ""),
    ("embeddings.word_embeddings.", "model.embed_tokens."),
    ("embeddings.", "model.embeddings."),
    ("encoder.layer.", "model.layers."),
)
MODERN_PARTS = (
    ("embeddings.tok_embeddings.", "model.embed_tokens."),
    ("embeddings.", "model.embeddings."),
    ("layers.", "model.layers."),
    ("final_norm.", "model.final_norm."),
)


def bert(hf: Mapping[str, Any]) -> EncoderSpec:
    of_sequences = _ending(hf) == SUFFIX
    head = EncoderHeadSpec(_labels(hf), "pooler.dense", "tanh") if of_sequences else None
    return _bert(hf, "bert", head)


def roberta(hf: Mapping[str, Any]) -> EncoderSpec:
    """RoBERTa and XLM-RoBERTa."""
    of_sequences = _ending(hf) == SUFFIX
    head = EncoderHeadSpec(_labels(hf), "classifier.dense", "tanh", out="classifier.out_proj") if of_sequences else None
    return _bert(hf, "roberta", head)


def _bert(hf: Mapping[str, Any], base: str, head: EncoderHeadSpec | None) -> EncoderSpec:
    """`base`: the prefix of a checkpoint with a head."""
    fields = ConfigReader(hf)
    _refuse_decoders(fields)
    if fields.text("position_embedding_type", "absolute") != "absolute":
        raise fields.refuse("position_embedding_type", "is not absolute, which alone is supported")
    if head is None and _ending(hf) == TOKEN_SUFFIX:
        head = EncoderHeadSpec(_labels(hf))
    norm = NormSpec(fields.number("layer_norm_eps", 1e-12), kind="layer", bias=True)
    attention = AttentionSpec(
        **_heads(fields),
        rope=NO_ROPE,
        qkv_bias=True,
        out_bias=True,
        qkv_names=("self.query", "self.key", "self.value"),
        out_name="output.dense",
    )
    mlp = MLPSpec(
        fields.integer("intermediate_size"),
        activation(fields, "hidden_act", "gelu", only_built_in=True),
        bias=True,
        gated=False,
        up_names=("intermediate.dense",),
        down_name="output.dense",
    )
    norms = BlockNorms("", "attention.output.LayerNorm", "", "output.LayerNorm")
    block = BlockSpec(attention, mlp, norm, norms, mlp_name="", attention_name="attention")
    first = first_position(hf)
    positions = fields.integer("max_position_embeddings", 512, minimum=first + 1)
    unused = ("cls.", "lm_head.") if head and head.dense.startswith("pooler") else ("cls.", "lm_head.", "pooler.")
    return EncoderSpec(
        vocab=fields.integer("vocab_size"),
        hidden=fields.integer("hidden_size"),
        max_position=positions - first,
        blocks=(block,) * fields.integer("num_hidden_layers"),
        norm=norm,
        tied=True,
        norm_name="",
        renames=_renames(base, PARTS, unused) + OLDER,
        post_norm=True,
        embedding_norm=norm,
        embedding_norm_name="LayerNorm",
        positions=positions,
        first_position=first,
        types=fields.integer("type_vocab_size", 2, minimum=0),
        classifier=head,
    )


def modern_bert(hf: Mapping[str, Any]) -> EncoderSpec:
    fields = ConfigReader(hf)
    _refuse_decoders(fields)
    norm = NormSpec(fields.number("norm_eps", 1e-5), kind="layer", bias=fields.flag("norm_bias"))
    head = None
    if _ending(hf) in (SUFFIX, TOKEN_SUFFIX):
        kind = activation(fields, "classifier_activation", "gelu", only_built_in=True)
        bias = fields.flag("classifier_bias")
        head = EncoderHeadSpec(_labels(hf), "head.dense", kind, bias, norm, "head.norm")
    kind = activation(fields, "hidden_activation", "gelu", only_built_in=True)
    mlp = MLPSpec(fields.integer("intermediate_size"), kind, fields.flag("mlp_bias"), up_names=("Wi",), down_name="Wo")
    positions = fields.integer("max_position_embeddings", 8192)
    blocks = tuple(
        BlockSpec(
            attention,
            mlp,
            norm,
            BlockNorms("attn_norm" if layer else "", before_mlp="mlp_norm"),
            attention_name="attn",
        )
        for layer, attention in enumerate(_modern_attention(fields, positions))
    )
    unused = ("decoder.",) if head else ("decoder.", "head.")
    return EncoderSpec(
        vocab=fields.integer("vocab_size"),
        hidden=fields.integer("hidden_size"),
        max_position=positions,
        blocks=blocks,
        norm=norm,
        tied=True,
        norm_name="final_norm",
        renames=_renames("model", MODERN_PARTS, unused),
        embedding_norm=norm,
        classifier=head,
    )


def _modern_attention(fields: ConfigReader, positions: int) -> list[AttentionSpec]:
    """The attention of each layer: full with one rope, or a window of half `local_attention` on each side with
    another."""
    layers, every = fields.integer("num_hidden_layers"), fields.integer("global_attn_every_n_layers", 3)
    types = fields.texts("layer_types") or [
        "sliding_attention" if layer % every else "full_attention" for layer in range(layers)
    ]
    if len(types) != layers or set(types) - {"full_attention", "sliding_attention"}:
        raise fields.refuse("layer_types", f"must name full_attention or sliding_attention for {layers} layers")
    dim, bias = head_size(fields), fields.flag("attention_bias")
    side = fields.integer("local_attention", 128, minimum=2) // 2
    specs = []
    for kind in types:
        is_full = kind == "full_attention"
        theta = fields.number("global_rope_theta", 160000.0)
        if not is_full:
            theta = fields.number("local_rope_theta", 10000.0)
        rope: RopeSpec = rope_by_type(fields, kind, dim, positions, theta)
        specs.append(
            AttentionSpec(
                **_heads(fields),
                rope=rope,
                qkv_bias=bias,
                out_bias=bias,
                qkv_names=("Wqkv",),
                out_name="Wo",
                window=0 if is_full else side + 1,
                ahead=0 if is_full else side,
            )
        )
    return specs


def _heads(fields: ConfigReader) -> dict[str, Any]:
    heads, dim = fields.integer("num_attention_heads"), head_size(fields)
    if heads * dim != fields.integer("hidden_size"):
        raise fields.refuse("hidden_size", f"must be a multiple of num_attention_heads {heads}")
    return {"heads": heads, "kv_heads": heads, "dim": dim, "scale": dim**-0.5}


def _refuse_decoders(fields: ConfigReader) -> None:
    refuse_unsupported(fields)
    for name in ("is_decoder", "add_cross_attention"):
        if fields.flag(name):
            raise fields.refuse(name, "is true: this family is served as an encoder only")


def _renames(base: str, parts: Renames, unused: tuple[str, ...]) -> Renames:
    """A checkpoint with a head has its model's tensors behind a prefix; one without it has none."""
    prefixes = (f"{base}.", "")
    return (
        *((prefix + old, new and new) for prefix in prefixes for old, new in parts),
        *((prefix + name, "") for prefix in prefixes for name in unused),
        (f"{base}.pooler.", "pooler."),
    )


def _labels(hf: Mapping[str, Any]) -> int:
    return len(classifier.labels(hf))


def _ending(hf: Mapping[str, Any]) -> str:
    """What the architecture's name has after its family's."""
    family = encoder_family(hf) or ""
    names = [name for name in hf.get("architectures") or () if isinstance(name, str) and name.startswith(family)]
    return names[0].removeprefix(family) if names else ""
