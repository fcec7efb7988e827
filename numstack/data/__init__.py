"""Text to token ids on disk, and from there to the same batches for every number of ranks.

``prepare`` writes a folder of memory-mapped token files in llm.c's format, ``open_dataset`` opens one, and a
``Sampler`` cuts batches from it: the batch of step s is a pure function of the seed and s.
"""

from numstack.data.dataset import Dataset, open_dataset, prepare, shakespeare
from numstack.data.sampler import Sampler, evenly_spaced_windows
from numstack.data.tokenizers import CharacterTokenizer, Gpt2Tokenizer, Tokenizer
from numstack.data.tokens import TokenFile, write_tokens

__all__ = [
    "CharacterTokenizer",
    "Dataset",
    "Gpt2Tokenizer",
    "Sampler",
    "TokenFile",
    "Tokenizer",
    "evenly_spaced_windows",
    "open_dataset",
    "prepare",
    "shakespeare",
    "write_tokens",
]
