"""Models of Hugging Face's transformers, made from a config: small, random, and nothing is downloaded.

Importing this imports transformers, which takes seconds: tests get it as the fixture `hf` (conftest.py), so that collecting
them costs nothing and they are skipped where it is not installed.
"""

import os

os.environ["HF_HUB_OFFLINE"] = "1"  # before the import; then a name that is not a local folder fails at once
os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, PreTrainedModel, T5Config, T5ForConditionalGeneration
from transformers.models.gpt2.modeling_gpt2 import GPT2Block
from transformers.models.llama.modeling_llama import LlamaDecoderLayer
from transformers.utils import logging

from tests.fsdp.models import seeded, token_batches
from tests.fsdp.training import SAMPLES

Tensor = torch.Tensor
STEPS = 3
VOCABULARY = 31
COMMON = {"vocab_size": VOCABULARY, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}

logging.disable_progress_bar()
logging.set_verbosity_error()  # checkpointing turns the cache off and warns about that, but it is intended


def make_gpt2() -> GPT2LMHeadModel:
    """lm_head is tied to the embedding. No dropout: ranks would draw other numbers than one process."""
    dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    return GPT2LMHeadModel(GPT2Config(n_positions=16, n_embd=18, n_layer=3, n_head=3, **dropout, **COMMON))


def make_llama() -> LlamaForCausalLM:
    """Rotary positions (buffers that are in no state_dict), grouped queries, and nothing tied."""
    sizes = {"hidden_size": 24, "intermediate_size": 37, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(max_position_embeddings=16, **sizes, **COMMON))


def make_t5() -> T5ForConditionalGeneration:
    """An encoder, which `generate` calls by itself, and a decoder; both use one embedding."""
    sizes = {"d_model": 24, "d_kv": 6, "d_ff": 37, "num_layers": 2, "num_heads": 4, "dropout_rate": 0.0, "decoder_start_token_id": 0}
    with seeded(0):
        return T5ForConditionalGeneration(T5Config(**sizes, **COMMON))


@dataclass(frozen=True)
class Family:
    """One architecture."""

    architecture: type[PreTrainedModel]
    block: type[nn.Module]

    def make(self, seed: int = 0, *, reentrant: bool | None = None) -> PreTrainedModel:
        """A model in training mode, with gradient checkpointing of either kind, or without for None."""
        with seeded(seed):
            model = (make_gpt2 if self.architecture is GPT2LMHeadModel else make_llama)()
        if reentrant is not None:
            enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable  # its former name
            enable({"use_reentrant": reentrant})
        return model.train()


FAMILIES = {"gpt2": Family(GPT2LMHeadModel, GPT2Block), "llama": Family(LlamaForCausalLM, LlamaDecoderLayer)}


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    """The loss that the model computes itself; called with keywords only, it returns a dataclass."""
    loss: Tensor = model(input_ids=tokens, labels=tokens).loss
    return loss


def shares(rank: int, world_size: int) -> Iterator[Tensor]:
    """This rank's part of each step's batch: [samples / world_size, length]."""
    share = SAMPLES // world_size
    for batch in token_batches(STEPS, SAMPLES, vocabulary=VOCABULARY):
        yield batch[rank * share :][:share]


def generate(model: Any, tokens: int = 6) -> list[int]:
    """A prompt's continuation by a model in evaluation mode: always the likeliest token, with the cache of keys and values."""
    prompt = torch.tensor([[1, 2, 3, 4]])
    options = {"max_new_tokens": tokens, "do_sample": False, "eos_token_id": None}
    found: list[int] = model.generate(prompt, attention_mask=torch.ones_like(prompt), **options)[0].tolist()
    return found
