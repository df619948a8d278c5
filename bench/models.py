"""The models that are measured: random weights, nothing downloaded, small enough for two CPU cores.

`build("gpt2", layers=6)` gives a `Workload` whose `model(*args)` returns the scalar loss. A further model is
one more function in `BUILDERS`; its keyword arguments are what callers may override.

The loss of a transformers model is computed here and not by its `labels=` argument, which breaks the graph.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.chargpt import CharGPT
from bench.custom_models import DLRM, Chain, Mamba, UNet, UnrolledLSTM


@dataclass(frozen=True)
class Workload:
    """A model in training mode and arguments with which `model(*args)` is its scalar loss."""

    model: nn.Module
    args: tuple[Tensor, ...]
    note: str

    @property
    def has_dropout(self) -> bool:
        """Whether a step draws random numbers, so that eager and compiled steps differ by nature."""
        return any(isinstance(module, nn.Dropout) and module.p > 0 for module in self.model.modules())


class NextTokenLoss(nn.Module):
    """Cross entropy of a causal language model; token t predicts token t + 1."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor) -> Tensor:
        logits = self.model(input_ids=tokens).logits[:, :-1]
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


class TokenLoss(nn.Module):
    """Cross entropy of a masked language model, one target per token."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(self.model(input_ids=tokens).logits.flatten(0, 1), targets.flatten())


class TranslationLoss(nn.Module):
    """Cross entropy of an encoder-decoder, whose decoder predicts target token t + 1 from those up to t."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, source: Tensor, targets: Tensor) -> Tensor:
        logits = self.model(input_ids=source, decoder_input_ids=targets[:, :-1].contiguous()).logits
        return F.cross_entropy(logits.flatten(0, 1), targets[:, 1:].flatten())


class ClassLoss(nn.Module):
    """Cross entropy of a classifier that returns logits, or a transformers output that holds them."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        output = self.model(inputs)
        return F.cross_entropy(output if isinstance(output, Tensor) else output.logits, targets)


def mlp(
    *, layers: int = 40, width: int = 256, batch: int = 1024, classes: int = 10, kaiming: bool = False
) -> Workload:
    """With torch's default weights the gradients of about 100 layers are denormal, and a step 17 times slower."""
    pairs = [module for _ in range(layers) for module in (nn.Linear(width, width), nn.GELU())]
    model = ClassLoss(nn.Sequential(*pairs, nn.Linear(width, classes)))
    for module in pairs if kaiming else ():
        if isinstance(module, nn.Linear):
            nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
    args = (torch.randn(batch, width), torch.randint(classes, (batch,)))
    return Workload(model, args, f"{layers} x (Linear {width} + GELU), batch {batch}")


def chargpt(
    *,
    layers: int = 2,
    width: int = 128,
    heads: int = 4,
    context: int = 128,
    vocabulary: int = 100,
    batch: int = 16,
    dropout: float = 0.0,
    attention: str = "sdpa",
    tied: bool = True,
) -> Workload:
    model = CharGPT(
        vocabulary, context, layers, width, heads, dropout=dropout, attention=attention, tied=tied
    )
    tokens = torch.randint(vocabulary, (batch, context + 1))
    args = (tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
    return Workload(model, args, f"{layers} layers, width {width}, {context} characters, batch {batch}")


def gpt2(
    *,
    layers: int = 2,
    width: int = 256,
    heads: int = 4,
    sequence: int = 256,
    vocabulary: int = 2048,
    batch: int = 4,
    dropout: float = 0.0,
    attention: str = "sdpa",
) -> Workload:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = _configured(
        GPT2Config,
        vocab_size=vocabulary,
        n_positions=sequence,
        n_embd=width,
        n_layer=layers,
        n_head=heads,
        resid_pdrop=dropout,
        embd_pdrop=dropout,
        attn_pdrop=dropout,
        bos_token_id=0,
        eos_token_id=0,
        use_cache=False,
        attn_implementation=attention,
    )
    note = f"{layers} layers, width {width}, {sequence} tokens, batch {batch}, {attention} attention"
    return Workload(NextTokenLoss(GPT2LMHeadModel(config)), (_tokens(vocabulary, batch, sequence),), note)


def llama(
    *,
    layers: int = 2,
    width: int = 256,
    hidden: int = 704,
    heads: int = 8,
    key_value_heads: int = 2,
    sequence: int = 256,
    vocabulary: int = 2048,
    batch: int = 4,
    attention: str = "sdpa",
) -> Workload:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = _configured(
        LlamaConfig,
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=key_value_heads,
        max_position_embeddings=sequence,
        use_cache=False,
        attn_implementation=attention,
    )
    note = f"{layers} layers, width {width}, {sequence} tokens, batch {batch}, {attention} attention"
    return Workload(NextTokenLoss(LlamaForCausalLM(config)), (_tokens(vocabulary, batch, sequence),), note)


def bert(
    *,
    layers: int = 2,
    width: int = 256,
    heads: int = 4,
    sequence: int = 128,
    vocabulary: int = 2048,
    batch: int = 8,
    dropout: float = 0.1,
    attention: str = "sdpa",
) -> Workload:
    from transformers import BertConfig, BertForMaskedLM

    config = _configured(
        BertConfig,
        vocab_size=vocabulary,
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        intermediate_size=4 * width,
        max_position_embeddings=sequence,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
        attn_implementation=attention,
    )
    args = (_tokens(vocabulary, batch, sequence), _tokens(vocabulary, batch, sequence))
    note = f"{layers} layers, width {width}, {sequence} tokens, batch {batch}, dropout {dropout}"
    return Workload(TokenLoss(BertForMaskedLM(config)), args, note)


def vit(
    *,
    layers: int = 2,
    width: int = 192,
    heads: int = 3,
    pixels: int = 64,
    patch: int = 8,
    batch: int = 8,
    classes: int = 10,
    dropout: float = 0.0,
    attention: str = "sdpa",
) -> Workload:
    from transformers import ViTConfig, ViTForImageClassification

    config = _configured(
        ViTConfig,
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        intermediate_size=4 * width,
        image_size=pixels,
        patch_size=patch,
        num_labels=classes,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
        attn_implementation=attention,
    )
    args = (torch.randn(batch, 3, pixels, pixels), torch.randint(classes, (batch,)))
    note = f"{layers} layers, width {width}, {pixels} px, batch {batch}"
    return Workload(ClassLoss(ViTForImageClassification(config)), args, note)


def resnet(
    *,
    layers: int = 1,
    width: int = 64,
    block: str = "bottleneck",
    pixels: int = 64,
    batch: int = 16,
    classes: int = 10,
) -> Workload:
    note = f"4 stages of {layers} {block} block(s), width {width}, {pixels} px, batch {batch}"
    return _resnet([layers] * 4, width, block, pixels, batch, classes, note)


def resnet50(*, width: int = 32, pixels: int = 64, batch: int = 16, classes: int = 10) -> Workload:
    note = f"stages of 3, 4, 6, 3 bottleneck blocks, width {width}, {pixels} px, batch {batch}"
    return _resnet([3, 4, 6, 3], width, "bottleneck", pixels, batch, classes, note)


def _resnet(depths: list[int], width: int, block: str, pixels: int, batch: int, classes: int, note: str) -> Workload:
    from transformers import ResNetConfig, ResNetForImageClassification

    expansion = 4 if block == "bottleneck" else 1
    config = _configured(
        ResNetConfig,
        depths=depths,
        embedding_size=width,
        hidden_sizes=[width * expansion * 2**stage for stage in range(4)],
        layer_type=block,
        num_labels=classes,
    )
    args = (torch.randn(batch, 3, pixels, pixels), torch.randint(classes, (batch,)))
    return Workload(ClassLoss(ResNetForImageClassification(config)), args, note)


def convnext(*, layers: int = 1, width: int = 48, pixels: int = 64, batch: int = 32, classes: int = 10) -> Workload:
    from transformers import ConvNextConfig, ConvNextForImageClassification

    config = _configured(
        ConvNextConfig,
        depths=[layers, layers, 3 * layers, layers],
        hidden_sizes=[width * 2**stage for stage in range(4)],
        image_size=pixels,
        num_labels=classes,
        drop_path_rate=0.0,
    )
    args = (torch.randn(batch, 3, pixels, pixels), torch.randint(classes, (batch,)))
    note = f"4 stages, {6 * layers} blocks, width {width}, {pixels} px, batch {batch}"
    return Workload(ClassLoss(ConvNextForImageClassification(config)), args, note)


def t5(
    *,
    layers: int = 3,
    width: int = 256,
    heads: int = 4,
    sequence: int = 128,
    vocabulary: int = 2048,
    batch: int = 4,
    dropout: float = 0.0,
) -> Workload:
    from transformers import T5Config, T5ForConditionalGeneration

    config = _configured(
        T5Config,
        vocab_size=vocabulary,
        d_model=width,
        d_kv=width // heads,
        d_ff=4 * width,
        num_layers=layers,
        num_decoder_layers=layers,
        num_heads=heads,
        dropout_rate=dropout,
        use_cache=False,
        decoder_start_token_id=0,
        pad_token_id=0,
    )
    args = (_tokens(vocabulary, batch, sequence), _tokens(vocabulary, batch, sequence + 1))
    note = f"{layers} + {layers} layers, width {width}, 2 x {sequence} tokens, batch {batch}, dropout {dropout}"
    return Workload(TranslationLoss(T5ForConditionalGeneration(config)), args, note)


def chain(*, layers: int = 64, elements: int = 16384) -> Workload:
    return Workload(Chain(layers, elements), (), f"{layers} x sine of {elements} elements")


def rnn(*, sequence: int = 64, width: int = 256, vocabulary: int = 256, batch: int = 96) -> Workload:
    args = (_tokens(vocabulary, batch, sequence), _tokens(vocabulary, batch, sequence))
    note = f"LSTM unrolled over {sequence} steps, width {width}, batch {batch}"
    return Workload(UnrolledLSTM(vocabulary, width), args, note)


def dlrm(
    *,
    tables: int = 12,
    rows: int = 2000,
    bag: int = 4,
    width: int = 32,
    features: int = 13,
    hidden: int = 256,
    batch: int = 8192,
) -> Workload:
    dense, clicked = torch.randn(batch, features), torch.randint(2, (batch,)).float()
    args = (dense, torch.randint(rows, (batch, tables, bag)), clicked)
    note = f"{tables} tables of {rows} x {width}, bags of {bag}, batch {batch}"
    return Workload(DLRM(tables, rows, width, features, hidden), args, note)


def unet(*, levels: int = 3, width: int = 32, pixels: int = 32, batch: int = 8, channels: int = 3) -> Workload:
    images, noise = torch.randn(2, batch, channels, pixels, pixels).unbind(0)
    args = (images, torch.randint(1000, (batch,)), noise)
    note = f"{levels} levels, width {width}, {pixels} px, batch {batch}"
    return Workload(UNet(channels, width, levels), args, note)


def mamba(
    *,
    layers: int = 4,
    width: int = 64,
    states: int = 16,
    sequence: int = 128,
    vocabulary: int = 512,
    batch: int = 2,
) -> Workload:
    note = f"{layers} layers, width {width}, {states} states, {sequence} tokens, batch {batch}"
    return Workload(Mamba(vocabulary, layers, width, states), (_tokens(vocabulary, batch, sequence),), note)


BUILDERS: dict[str, Callable[..., Workload]] = {
    "mlp": mlp,
    "chargpt": chargpt,
    "gpt2": gpt2,
    "llama": llama,
    "bert": bert,
    "vit": vit,
    "resnet": resnet,
    "resnet50": resnet50,
    "convnext": convnext,
    "t5": t5,
    "unet": unet,
    "rnn": rnn,
    "dlrm": dlrm,
    "mamba": mamba,
    "chain": chain,
}


def build(name: str, *, seed: int = 0, device: str = "cpu", **overrides: Any) -> Workload:
    """The named workload with weights and inputs drawn from `seed`; `overrides` are the builder's."""
    if name not in BUILDERS:
        raise ValueError(f"unknown model {name!r}; known: {', '.join(BUILDERS)}")
    accepted = inspect.signature(BUILDERS[name]).parameters
    if unknown := sorted(set(overrides) - set(accepted)):
        raise ValueError(f"{name} has no {', '.join(unknown)}; it accepts {', '.join(accepted)}")
    torch.manual_seed(seed)
    workload = BUILDERS[name](**overrides)
    model = workload.model.train().to(device)
    return Workload(model, tuple(argument.to(device) for argument in workload.args), workload.note)


def parse_spec(spec: str) -> tuple[str, dict[str, Any]]:
    """Read `gpt2:layers=6:attention=eager` into a name and overrides of the types that the builder has."""
    name, *assignments = spec.split(":")
    if name not in BUILDERS:
        raise ValueError(f"unknown model {name!r}; known: {', '.join(BUILDERS)}")
    defaults = {
        key: parameter.default for key, parameter in inspect.signature(BUILDERS[name]).parameters.items()
    }
    overrides = {}
    for assignment in assignments:
        key, equals, text = assignment.partition("=")
        if not equals or key not in defaults:
            raise ValueError(f"cannot read {assignment!r} in {spec!r}; {name} accepts {', '.join(defaults)}")
        kind = type(defaults[key])
        overrides[key] = text.lower() in ("1", "true", "yes") if kind is bool else kind(text)
    return name, overrides


def _configured(config: Callable[..., Any], **values: Any) -> Any:
    """A transformers configuration; it takes more (`attn_implementation`, `num_labels`) than it declares."""
    return config(**values)


def _tokens(vocabulary: int, batch: int, sequence: int) -> Tensor:
    return torch.randint(vocabulary, (batch, sequence))
