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
        """The first example of the batch."""
        return {name: value[:1] for name, value in self.batch.items()}


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


def made(name: str, seed: int = 0) -> Animal:
    """An animal of the zoo, in training mode."""
    torch.manual_seed(seed)
    animal = FOREIGN[name]()
    animal.net.train()
    return animal
