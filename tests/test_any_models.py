"""Other people's models, as they come: tiny ones, built from their arguments."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock, patch

import pytest
import torch
from cases import WIDTH, Case, adamw
from frameworks import ASYNCHRONOUS, SYNCHRONOUS, check_asynchronous, check_joined, check_parts
from torch import Tensor, nn

PICTURES = ("torchvision", "torchvision.ops", "torchvision.ops.misc", "torchvision.transforms")
PICTURES += (
    "torchvision.transforms.functional",
    "torchvision.models",
    "torchvision.models.feature_extraction",
)
PICTURES += ("torchvision.datasets", "torchvision.datasets.folder", "PIL", "PIL.Image", "PIL.ImageOps")


def loads(name: str) -> bool:
    try:
        importlib.import_module(name)
    except Exception:  # torchvision's extension has to fit torch's build, else it raises what it likes
        return False
    return True


def timm() -> ModuleType:
    """timm reads files of pictures with torchvision and Pillow; its models do without."""
    if importlib.util.find_spec("timm") is None:
        pytest.skip("timm is not installed")
    absent = {name: MagicMock() for name in PICTURES if not loads(name)}
    for module in absent.values():
        module.__version__, module.FrozenBatchNorm2d = "12.0", type("FrozenBatchNorm2d", (nn.Module,), {})
    with patch.dict(sys.modules, absent):
        return importlib.import_module("timm.models")


class Tokens(nn.Module):
    """A language model on tokens made of the features, and a way around it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model, self.around = model, nn.Linear(WIDTH, 4)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.model((inputs * 8).long() % 32).logits[:, -1, :4] + self.around(inputs)


def gpt2() -> nn.Module:
    """Its head is its table."""
    transformers = pytest.importorskip("transformers")
    shape = {"n_embd": 16, "n_layer": 2, "n_head": 2, "vocab_size": 32, "n_positions": 16}
    still = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 0, "eos_token_id": 0}
    return Tokens(transformers.GPT2LMHeadModel(transformers.GPT2Config(**shape, **still)))


def llama() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    shape = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "vocab_size": 32}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 16}
    return Tokens(transformers.LlamaForCausalLM(transformers.LlamaConfig(**shape, **heads)))


class Pictures(nn.Module):
    """An image model on images made of the features."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, inputs: Tensor) -> Tensor:
        return self.model(inputs.view(-1, 1, 2, 4).repeat(1, 3, 8, 4))


def vit() -> nn.Module:
    shape = {"img_size": 16, "patch_size": 8, "embed_dim": 16, "depth": 2, "num_heads": 2, "num_classes": 4}
    return Pictures(timm().vision_transformer.VisionTransformer(**shape))


def resnet() -> nn.Module:
    """Batch norm all over."""
    part = timm().resnet
    return Pictures(
        part.ResNet(part.BasicBlock, (1, 1, 1, 1), num_classes=4, channels=(8, 8, 8, 8), stem_width=8)
    )


JOINED = {"transformers' GPT-2": gpt2, "transformers' Llama": llama, "timm's ViT": vit}


@pytest.mark.parametrize("cluster", SYNCHRONOUS.values(), ids=SYNCHRONOUS)
@pytest.mark.parametrize("build", JOINED.values(), ids=JOINED)
def test_other_peoples_models(build: Callable[[], nn.Module], cluster: Mapping[str, Any]) -> None:
    """Llama's norms compute in float32 whatever they are given."""
    check_joined(Case(build, adamw), cluster, 1e-5 if build is llama else 1e-9)


@pytest.mark.parametrize("cluster", SYNCHRONOUS.values(), ids=SYNCHRONOUS)
def test_a_resnet_equals_the_average_of_parts(cluster: Mapping[str, Any]) -> None:
    check_parts(Case(resnet, adamw), cluster)


@pytest.mark.parametrize("cluster", ASYNCHRONOUS.values(), ids=ASYNCHRONOUS)
@pytest.mark.parametrize("build", JOINED.values(), ids=JOINED)
def test_other_peoples_models_learn_with_groups(
    build: Callable[[], nn.Module], cluster: Mapping[str, Any]
) -> None:
    case = Case(build, lambda model: torch.optim.SGD(model.parameters(), lr=0.02), steps=30)
    check_asynchronous(case, cluster, 0.95)


@pytest.mark.parametrize("name", ["downpour", "hogwild"])
def test_a_resnet_learns_with_groups(name: str) -> None:
    case = Case(resnet, lambda model: torch.optim.SGD(model.parameters(), lr=0.02), steps=30)
    check_asynchronous(case, ASYNCHRONOUS[name], 1.0)
