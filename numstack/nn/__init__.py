"""Modules: the parameters of a model, and how they combine."""

from numstack.nn.gpt import GPT, GPTConfig
from numstack.nn.layers import Embedding, LayerNorm, Linear
from numstack.nn.module import Module, Parameter
from numstack.nn.parameters import ParameterStore

__all__ = ["GPT", "Embedding", "GPTConfig", "LayerNorm", "Linear", "Module", "Parameter", "ParameterStore"]
