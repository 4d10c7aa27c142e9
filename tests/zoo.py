"""Networks that nobody here wrote: small ones of transformers, from configurations, with a batch and a loss each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
import transformers as hf
from torch import Tensor, nn


def loss_of(net: nn.Module, batch: Any) -> Tensor:
    """How far the outputs are from numbers drawn once: a loss for any network."""
    generator = torch.Generator().manual_seed(7)
    leaves = outputs(net(**batch))
    drawn = [torch.randn(leaf.shape, generator=generator).to(leaf) for leaf in leaves]
    return torch.stack([F.mse_loss(leaf, each) for leaf, each in zip(leaves, drawn, strict=True)]).sum()


def outputs(output: Any) -> list[Tensor]:
    """The floating tensors of an output, whatever holds them; caches are left out."""
    if isinstance(output, Tensor):
        return [output] if output.is_floating_point() else []
    if isinstance(output, dict):
        return [leaf for name, value in output.items() if "cache" not in name for leaf in outputs(value)]
    if isinstance(output, tuple | list):
        return [leaf for value in output for leaf in outputs(value)]
    return []


@dataclass(frozen=True)
class Animal:
    """A network, what it is fed with, and what it is trained for."""

    net: nn.Module
    batch: dict[str, Tensor]
    loss: Callable[[nn.Module, Any], Tensor] = field(repr=False, default=loss_of)

    @property
    def first(self) -> dict[str, Tensor]:
        """The first example of the batch; a graph as a whole."""
        return self.batch if "edges" in self.batch else {name: value[:1] for name, value in self.batch.items()}


def words(size: int = 3, length: int = 6, seed: int = 0) -> dict[str, Tensor]:
    """Texts as numbers of words."""
    return {"input_ids": torch.randint(3, 30, (size, length), generator=torch.Generator().manual_seed(seed))}


def pictures(pixels: int, size: int = 3, seed: int = 0) -> dict[str, Tensor]:
    """Small pictures."""
    generator = torch.Generator().manual_seed(seed)
    return {"pixel_values": torch.randn(size, 3, pixels, pixels, generator=generator)}


def sounds(size: int = 3, bands: int = 8, length: int = 20) -> dict[str, Tensor]:
    """Spectra of short sounds."""
    return {"input_features": torch.randn(size, bands, length, generator=torch.Generator().manual_seed(0))}


_TEXT = {"vocab_size": 30, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
         "num_attention_heads": 4, "max_position_embeddings": 16, "use_cache": False}  # fmt: skip
_GROUPED = {**_TEXT, "num_key_value_heads": 2, "tie_word_embeddings": False, "pad_token_id": 0}


def _bert() -> Animal:
    return Animal(hf.BertForSequenceClassification(hf.BertConfig(**_TEXT, num_labels=3)), words())


def _distilbert() -> Animal:
    config = hf.DistilBertConfig(
        vocab_size=30, dim=16, hidden_dim=24, n_layers=2, n_heads=4, max_position_embeddings=16
    )
    return Animal(hf.DistilBertForSequenceClassification(config), words())


def _electra() -> Animal:
    return Animal(hf.ElectraForSequenceClassification(hf.ElectraConfig(**_TEXT, embedding_size=12)), words())


def _albert() -> Animal:
    return Animal(hf.AlbertForSequenceClassification(hf.AlbertConfig(**_TEXT, embedding_size=12)), words())


def _gpt2() -> Animal:
    config = hf.GPT2Config(vocab_size=30, n_embd=16, n_layer=2, n_head=4, n_positions=16, use_cache=False)
    return Animal(hf.GPT2LMHeadModel(config), words())


def _opt() -> Animal:
    config = hf.OPTConfig(vocab_size=30, hidden_size=16, ffn_dim=24, num_hidden_layers=2, num_attention_heads=4,
                          max_position_embeddings=16, word_embed_proj_dim=16, use_cache=False)  # fmt: skip
    return Animal(hf.OPTForCausalLM(config), words())


def _neox() -> Animal:
    return Animal(hf.GPTNeoXForCausalLM(hf.GPTNeoXConfig(**_TEXT)), words())


def _llama() -> Animal:
    return Animal(hf.LlamaForCausalLM(hf.LlamaConfig(**_GROUPED)), words())


def _qwen2() -> Animal:
    return Animal(hf.Qwen2ForCausalLM(hf.Qwen2Config(**_GROUPED)), words())


def _gemma() -> Animal:
    return Animal(hf.GemmaForCausalLM(hf.GemmaConfig(**_GROUPED, head_dim=4)), words())


def _mixtral() -> Animal:
    config = hf.MixtralConfig(**_GROUPED, num_local_experts=3, num_experts_per_tok=2)
    return Animal(hf.MixtralForCausalLM(config), words())


def _mamba() -> Animal:
    config = hf.MambaConfig(vocab_size=30, hidden_size=16, state_size=4, num_hidden_layers=2, use_cache=False)
    return Animal(hf.MambaForCausalLM(config), words())


def _t5() -> Animal:
    config = hf.T5Config(vocab_size=30, d_model=16, d_kv=4, d_ff=24, num_layers=2, num_heads=4, use_cache=False,
                         decoder_start_token_id=0)  # fmt: skip
    texts = words()
    return Animal(hf.T5ForConditionalGeneration(config), {**texts, "decoder_input_ids": texts["input_ids"][:, :4]})


def _vit() -> Animal:
    return Animal(hf.ViTForImageClassification(hf.ViTConfig(**_PICTURE, num_labels=3)), pictures(8))


def _deit() -> Animal:
    return Animal(hf.DeiTForImageClassification(hf.DeiTConfig(**_PICTURE, num_labels=3)), pictures(8))


def _clip() -> Animal:
    return Animal(hf.CLIPVisionModel(hf.CLIPVisionConfig(**_PICTURE)), pictures(8))


_PICTURE = {"image_size": 8, "patch_size": 4, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
            "num_attention_heads": 4}  # fmt: skip


def _swin() -> Animal:
    config = hf.SwinConfig(image_size=16, patch_size=2, embed_dim=8, depths=[2, 2], num_heads=[2, 4], window_size=4)
    return Animal(hf.SwinForImageClassification(config), pictures(16))


def _segformer() -> Animal:
    config = hf.SegformerConfig(
        num_encoder_blocks=2, depths=[1, 1], sr_ratios=[2, 1], hidden_sizes=[8, 16], patch_sizes=[3, 3],
        strides=[2, 2], num_attention_heads=[2, 4], mlp_ratios=[2, 2], decoder_hidden_size=12, num_labels=3,
    )  # fmt: skip
    return Animal(hf.SegformerForSemanticSegmentation(config), pictures(16))


def _convnext() -> Animal:
    config = hf.ConvNextConfig(hidden_sizes=[8, 12], depths=[1, 2], num_stages=2, patch_size=2, num_labels=3)
    return Animal(hf.ConvNextForImageClassification(config), pictures(16))


def _regnet() -> Animal:
    config = hf.RegNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 2], groups_width=4, num_labels=3)
    return Animal(hf.RegNetForImageClassification(config), pictures(16))


def _resnet() -> Animal:
    config = hf.ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 2], layer_type="basic", num_labels=3)
    return Animal(hf.ResNetForImageClassification(config), pictures(16))


def _mobilenet() -> Animal:
    config = hf.MobileNetV2Config(depth_multiplier=0.25, image_size=32, first_layer_is_expansion=True, num_labels=3)
    return Animal(hf.MobileNetV2ForImageClassification(config), pictures(32))


def _mobilevit() -> Animal:
    config = hf.MobileViTConfig(image_size=32, hidden_sizes=[8, 12, 16], neck_hidden_sizes=[4, 8, 8, 8, 12, 16, 16],
                                num_attention_heads=2, num_labels=3)  # fmt: skip
    return Animal(hf.MobileViTForImageClassification(config), pictures(32))


def _whisper() -> Animal:
    config = hf.WhisperConfig(
        vocab_size=30, d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=24, decoder_ffn_dim=24, num_mel_bins=8, max_source_positions=10,
        max_target_positions=8, use_cache=False, pad_token_id=0, bos_token_id=1, eos_token_id=2,
        decoder_start_token_id=1,
    )  # fmt: skip
    asked = {"decoder_input_ids": words(length=4)["input_ids"]}
    return Animal(hf.WhisperForConditionalGeneration(config), {**sounds(), **asked})


def _wav2vec2() -> Animal:
    config = hf.Wav2Vec2Config(
        vocab_size=30, hidden_size=16, num_hidden_layers=1, num_attention_heads=4, intermediate_size=24,
        conv_dim=(8, 8), conv_stride=(4, 2), conv_kernel=(5, 3), num_conv_pos_embeddings=4,
        num_conv_pos_embedding_groups=2, num_feat_extract_layers=2, layerdrop=0.0, apply_spec_augment=False,
    )  # fmt: skip
    generator = torch.Generator().manual_seed(0)
    return Animal(hf.Wav2Vec2ForCTC(config), {"input_values": torch.randn(3, 120, generator=generator)})


FOREIGN: dict[str, Callable[[], Animal]] = {
    name.strip("_"): maker
    for name, maker in {
        "bert": _bert, "distilbert": _distilbert, "electra": _electra, "albert": _albert, "gpt2": _gpt2, "opt": _opt,
        "neox": _neox, "llama": _llama, "qwen2": _qwen2, "gemma": _gemma, "mixtral": _mixtral, "mamba": _mamba,
        "t5": _t5, "vit": _vit, "deit": _deit, "clip": _clip, "swin": _swin, "segformer": _segformer,
        "convnext": _convnext, "regnet": _regnet, "resnet": _resnet, "mobilenet": _mobilenet,
        "mobilevit": _mobilevit, "whisper": _whisper, "wav2vec2": _wav2vec2,
    }.items()
}  # fmt: skip


# In the style of timm's: written here, for timm is no dependency.


class NormAct(nn.BatchNorm2d):
    """Batch normalisation with its activation in it, as timm's BatchNormAct2d."""

    def __init__(self, channels: int, act: bool = True) -> None:
        super().__init__(channels)
        self.drop, self.act = nn.Identity(), nn.SiLU() if act else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """Normalise as torch does, then activate."""
        if self.training and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
        x = F.batch_norm(
            x, self.running_mean, self.running_var, self.weight, self.bias, self.training, self.momentum or 0.0,
            self.eps,
        )  # fmt: skip
        return self.act(self.drop(x))


class ConvNormAct(nn.Module):
    """Convolution, batch normalisation and activation."""

    def __init__(self, inputs: int, outputs: int, size: int = 3, stride: int = 1, groups: int = 1, act: bool = True):
        super().__init__()
        self.conv = nn.Conv2d(inputs, outputs, size, stride, size // 2, groups=groups, bias=False)
        self.bn = NormAct(outputs, act)

    def forward(self, x: Tensor) -> Tensor:
        """One after the other."""
        return self.bn(self.conv(x))


class SqueezeExcite(nn.Module):
    """Each channel times a factor that is made of all channels' means."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.reduce, self.expand = nn.Conv2d(channels, 4, 1), nn.Conv2d(4, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        """A gate."""
        return x * self.expand(F.relu(self.reduce(x.mean((2, 3), keepdim=True)))).sigmoid()


class InvertedResidual(nn.Module):
    """Wide, depthwise, squeeze and excite, narrow; the input is added."""

    def __init__(self, inputs: int, outputs: int, stride: int = 1, wider: int = 3) -> None:
        super().__init__()
        wide = inputs * wider
        self.conv_pw, self.conv_dw = ConvNormAct(inputs, wide, 1), ConvNormAct(wide, wide, 3, stride, groups=wide)
        self.se, self.conv_pwl = SqueezeExcite(wide), ConvNormAct(wide, outputs, 1, act=False)
        self.skips = stride == 1 and inputs == outputs

    def forward(self, x: Tensor) -> Tensor:
        """Around it, where the shapes are the same."""
        y = self.conv_pwl(self.se(self.conv_dw(self.conv_pw(x))))
        return y + x if self.skips else y


class GroupedBottleneck(nn.Module):
    """ResNeXt's and RegNet's block: a grouped convolution between two narrow ones."""

    def __init__(self, inputs: int, outputs: int, groups: int = 4) -> None:
        super().__init__()
        self.conv1, self.conv2 = ConvNormAct(inputs, outputs, 1), ConvNormAct(outputs, outputs, 3, groups=groups)
        self.se, self.conv3 = SqueezeExcite(outputs), ConvNormAct(outputs, outputs, 1, act=False)
        self.downsample = ConvNormAct(inputs, outputs, 1, act=False) if inputs != outputs else nn.Identity()
        self.act3 = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        """The sum is activated."""
        return self.act3(self.conv3(self.se(self.conv2(self.conv1(x)))) + self.downsample(x))


class LayerNorm2d(nn.LayerNorm):
    """Layer normalisation over the channels of an image."""

    def forward(self, x: Tensor) -> Tensor:
        """Channels last, and back."""
        return F.layer_norm(x.permute(0, 2, 3, 1), self.normalized_shape, self.weight, self.bias, self.eps).permute(
            0, 3, 1, 2
        )


class ConvNeXtLike(nn.Module):
    """A wide depthwise convolution, then two linear layers at each place, with a factor for each channel."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv_dw, self.norm = nn.Conv2d(channels, channels, 5, padding=2, groups=channels), LayerNorm2d(channels)
        self.fc1, self.fc2 = nn.Conv2d(channels, 3 * channels, 1), nn.Conv2d(3 * channels, channels, 1)
        self.gamma = nn.Parameter(torch.full((channels,), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        """A residual."""
        return x + self.fc2(F.gelu(self.fc1(self.norm(self.conv_dw(x))))) * self.gamma.reshape(1, -1, 1, 1)


class Classifier(nn.Module):
    """A stem, blocks and a head."""

    def __init__(self, *blocks: nn.Module, outputs: int, drop: float = 0.0) -> None:
        super().__init__()
        self.stem, self.blocks = ConvNormAct(3, 8, stride=2), nn.Sequential(*blocks)
        self.drop, self.head = nn.Dropout(drop), nn.Linear(outputs, 4)

    def forward(self, pixel_values: Tensor) -> Tensor:
        """Logits."""
        return self.head(self.drop(self.blocks(self.stem(pixel_values)).mean((2, 3))))


def _mobile() -> Animal:
    blocks = InvertedResidual(8, 8), InvertedResidual(8, 12, 2), InvertedResidual(12, 12)
    return Animal(Classifier(*blocks, outputs=12, drop=0.2), pictures(12))


def _resnext() -> Animal:
    return Animal(Classifier(GroupedBottleneck(8, 16), GroupedBottleneck(16, 16), outputs=16), pictures(12))


def _convnext_like() -> Animal:
    return Animal(Classifier(ConvNeXtLike(8), ConvNeXtLike(8), outputs=8), pictures(12))


# Networks of other kinds, as people write them.


class Block(nn.Module):
    """nanoGPT's block."""

    def __init__(self, width: int, heads: int, length: int) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.c_attn, self.c_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.c_fc, self.c_out, self.heads = nn.Linear(width, 4 * width), nn.Linear(4 * width, width), heads
        self.register_buffer("bias", torch.tril(torch.ones(length, length)).view(1, 1, length, length))

    def forward(self, x: Tensor) -> Tensor:
        """Attention written out, then a perceptron."""
        size, length, width = x.size()
        split = self.c_attn(self.ln_1(x)).split(width, dim=2)
        q, k, v = (each.view(size, length, self.heads, width // self.heads).transpose(1, 2) for each in split)
        att = (q @ k.transpose(-2, -1)) / (width // self.heads) ** 0.5
        att = att.masked_fill(self.bias[:, :, :length, :length] == 0, float("-inf")).softmax(-1)
        x = x + self.c_proj((att @ v).transpose(1, 2).contiguous().view(size, length, width))
        return x + self.c_out(F.gelu(self.c_fc(self.ln_2(x))))


class NanoGPT(nn.Module):
    """Tokens, positions, blocks; one table for input and output; the loss is optional."""

    def __init__(self) -> None:
        super().__init__()
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(30, 16),
                "wpe": nn.Embedding(8, 16),
                "h": nn.ModuleList(Block(16, 4, 8) for _ in range(2)),
                "ln_f": nn.LayerNorm(16),
            }
        )
        self.lm_head = nn.Linear(16, 30, bias=False)
        self.transformer["wte"].weight = self.lm_head.weight

    def forward(self, input_ids: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """Logits, and the loss if there is something to compare with."""
        place = torch.arange(0, input_ids.size(1), dtype=torch.long, device=input_ids.device)
        x = self.transformer["wte"](input_ids) + self.transformer["wpe"](place)
        for block in self.transformer["h"]:
            x = block(x)
        logits = self.lm_head(self.transformer["ln_f"](x))
        return logits, None if targets is None else F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class UNet(nn.Module):
    """Down and up again, with a skip."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.deep = ConvNormAct(3, 8), ConvNormAct(8, 12)
        self.up, self.join, self.out = nn.ConvTranspose2d(12, 8, 2, 2), ConvNormAct(16, 8), nn.Conv2d(8, 2, 1)

    def forward(self, pixel_values: Tensor) -> Tensor:
        """An image."""
        first = self.down(pixel_values)
        return self.out(self.join(torch.cat([first, self.up(self.deep(F.max_pool2d(first, 2)))], 1)))


class Recurrent(nn.Module):
    """A table, a recurrent network of two layers, and the last output."""

    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.tokens, self.rnn = nn.Embedding(30, 8), kind(8, 12, num_layers=2, batch_first=True)  # type: ignore[arg-type]
        self.head = nn.Linear(12, 4)

    def forward(self, input_ids: Tensor) -> Tensor:
        """Logits."""
        return self.head(self.rnn(self.tokens(input_ids))[0][:, -1])


class GCN(nn.Module):
    """Graph convolutions with a dense matrix of edges."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(5, 12, bias=False), nn.Linear(12, 4)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        """A row for each node."""
        return edges @ self.second(F.relu(edges @ self.first(x)))


class GAT(nn.Module):
    """Graph attention with two heads, written out."""

    def __init__(self) -> None:
        super().__init__()
        self.W = nn.Parameter(torch.randn(5, 16) * 0.4)
        self.att = nn.Parameter(torch.randn(2, 1, 8) * 0.4)
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        """Each node attends to its neighbours."""
        h = (x @ self.W).view(len(x), 2, 8).transpose(0, 1)
        score = (h * self.att).sum(-1)
        score = F.leaky_relu(score.unsqueeze(2) + score.unsqueeze(1), 0.2)
        share = score.masked_fill(edges == 0, -1e9).softmax(-1)
        return self.head(F.elu((share @ h).transpose(0, 1).flatten(1)))


def graph(nodes: int = 9) -> dict[str, Tensor]:
    """A graph of nodes with five features each."""
    generator = torch.Generator().manual_seed(0)
    edges = (torch.rand(nodes, nodes, generator=generator) < 0.4).float() + torch.eye(nodes)
    return {"x": torch.randn(nodes, 5, generator=generator), "edges": edges.clamp(max=1) / 3}


WRITTEN: dict[str, Callable[[], Animal]] = {
    "timm_mobile": _mobile, "timm_resnext": _resnext, "timm_convnext": _convnext_like,
    "nanogpt": lambda: Animal(NanoGPT(), words()), "unet": lambda: Animal(UNet(), pictures(8)),
    "lstm": lambda: Animal(Recurrent(nn.LSTM), words()), "gru": lambda: Animal(Recurrent(nn.GRU), words()),
    "gcn": lambda: Animal(GCN(), graph()), "gat": lambda: Animal(GAT(), graph()),
}  # fmt: skip
ANIMALS = {**FOREIGN, **WRITTEN}


def made(name: str, seed: int = 0) -> Animal:
    """An animal of the zoo, in training mode."""
    torch.manual_seed(seed)
    animal = ANIMALS[name]()
    animal.net.train()
    return animal
