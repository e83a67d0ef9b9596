"""The short name people know a quantised file by, such as Q4_K_M."""

from collections import Counter

from engine.gguf.file import GgufFile

_FILE_TYPES = {
    0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 7: "Q8_0", 8: "Q5_0", 9: "Q5_1", 10: "Q2_K", 11: "Q3_K_S", 12: "Q3_K_M",
    13: "Q3_K_L", 14: "Q4_K_S", 15: "Q4_K_M", 16: "Q5_K_S", 17: "Q5_K_M", 18: "Q6_K", 20: "IQ2_XS", 21: "Q2_K_S",
    22: "IQ3_XS", 23: "IQ3_XXS", 25: "IQ4_NL", 26: "IQ3_S", 27: "IQ3_M", 28: "IQ2_S", 29: "IQ2_M", 30: "IQ4_XS",
    32: "BF16", 38: "MXFP4_MOE",
}  # fmt: skip


def quantisation_name(gguf: GgufFile) -> str:
    """The recipe that `general.file_type` names, if most weights bear it out; else the type of most weights.

    The key is often wrong in files made by hand, so it is believed only as far as the family: Q4, IQ3, F16.
    """
    weights: Counter[str] = Counter()
    for info in gguf.tensors.values():
        weights[info.quant.name] += info.elements
    if not weights:
        return "none"
    most = weights.most_common(1)[0][0]
    recipe = _FILE_TYPES.get(gguf.u32("general.file_type", 0) & 0x3FF, most)
    return recipe if recipe.split("_")[0] == most.split("_")[0] else most
