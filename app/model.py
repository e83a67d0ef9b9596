"""What the service itself knows of the model file: its identity and its text side. Weights are the engine's."""

from dataclasses import dataclass

from app.prompts import Prompts
from app.text.template import ChatTemplate
from app.text.tokenizer import Tokenizer
from engine.gguf import open_gguf
from engine.gguf.file_type import quantisation_name


@dataclass(frozen=True)
class ServedModel:
    name: str
    """The id that clients send."""
    path: str
    architecture: str
    quantisation: str
    trained_context: int
    prompts: Prompts


def read_model(path: str, name: str) -> ServedModel:
    """Parse the header, the vocabulary and the chat template. Raises ModelFileError naming the field."""
    gguf = open_gguf(path)
    architecture = gguf.text("general.architecture")
    tokenizer = Tokenizer.from_gguf(gguf)
    return ServedModel(
        name=name,
        path=path,
        architecture=architecture,
        quantisation=quantisation_name(gguf),
        trained_context=gguf.u32(f"{architecture}.context_length", 0),
        prompts=Prompts(tokenizer, ChatTemplate.from_gguf(gguf, tokenizer)),
    )
