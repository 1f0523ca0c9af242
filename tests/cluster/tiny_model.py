"""A tiny model in a folder that a server can serve: seeded weights, a byte-level tokenizer, long contexts."""

from fake_engine import byte_tokenizer
from transformers import PreTrainedTokenizerFast


def save(tiny_llama, folder, **shape):
    shape = {"vocab_size": 300, "max_position_embeddings": 8192, "initializer_range": 0.1} | shape
    tiny_llama(**shape).save_pretrained(folder)
    PreTrainedTokenizerFast(tokenizer_object=byte_tokenizer().backend).save_pretrained(folder)
    return folder
