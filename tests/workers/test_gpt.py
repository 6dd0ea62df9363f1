"""The model predicts from the past only, starts ignorant, learns, and generates what it was taught."""

import math

import pytest
import torch
import torch.nn.functional as F

from gpt import GPT, VOCABULARY, GPTConfig, parameter_count

TINY = GPTConfig(dim=32, layers=2, heads=2, context=16, bigrams=8)


def model(config: GPTConfig = TINY, *, outputs: bool = True) -> GPT:
    """A model whose zeroed output layers are filled, so that every part of it shows in the logits."""
    torch.manual_seed(0)
    made = GPT(config)
    if outputs:
        for parameter in made.parameters():
            if not parameter.detach().any():
                torch.nn.init.normal_(parameter, std=0.1)
    return made


def test_logits_have_one_row_for_each_byte() -> None:
    assert model()(torch.randint(256, (3, 11))).shape == (3, 11, VOCABULARY)


def test_an_untrained_model_knows_nothing() -> None:
    text = torch.randint(256, (2, 16))
    loss = F.cross_entropy(model(outputs=False)(text).flatten(0, 1), text.flatten())
    assert math.isclose(loss.item(), math.log(256), rel_tol=1e-6)


@pytest.mark.parametrize("bigrams", [0, 8])
def test_a_byte_does_not_change_what_came_before_it(bigrams: int) -> None:
    gpt = model(GPTConfig(dim=32, layers=2, heads=2, context=16, bigrams=bigrams))
    text = torch.randint(255, (1, 16))
    changed = text.clone()
    changed[0, 9] += 1
    before, after = gpt(text), gpt(changed)
    assert torch.equal(before[:, :9], after[:, :9])
    assert not torch.allclose(before[:, 9:], after[:, 9:])


def test_generating_with_kept_keys_and_values_is_the_forward_pass() -> None:
    """Greedy generation, byte by byte from kept keys and values, equals a full forward for every byte."""
    gpt = model()
    generated = gpt.generate(b"def ", 12, top_k=1)
    for length in range(4, 16):
        logits = gpt(torch.tensor([list(generated[:length])]))
        assert generated[length] == int(logits[0, -1].argmax())


def test_generation_goes_on_beyond_the_context() -> None:
    prompt = bytes(range(40))
    generated = model().generate(prompt, 50, seed=3)
    assert generated[:40] == prompt
    assert len(generated) == 90
    assert generated == model().generate(prompt, 50, seed=3)
    assert generated != model().generate(prompt, 50, seed=4)


def test_it_learns_a_sentence_by_heart() -> None:
    sentence = b"the quick brown fox jumps over the lazy dog. " * 2
    gpt = model(GPTConfig(dim=64, layers=2, heads=2, context=64, bigrams=0), outputs=False)
    optimizer = torch.optim.AdamW(gpt.parameters(), lr=5e-3)
    text = torch.tensor([list(sentence[:65])])
    for _ in range(60):
        loss = F.cross_entropy(gpt(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())
        torch.autograd.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    assert loss.item() < 0.1
    assert gpt.generate(sentence[:45], 20, top_k=1) == sentence[:65]


def test_the_default_size_is_what_the_help_says() -> None:
    assert 5e6 < parameter_count(GPT(GPTConfig())) < 10e6


@pytest.mark.parametrize("sizes", [{"dim": 0}, {"layers": 0}, {"heads": 3}, {"dim": 36, "heads": 4, "context": 0}, {"bigrams": -1}])
def test_impossible_sizes_are_refused(sizes: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="must be"):
        GPTConfig(**sizes)
