"""Write onnx.npz: the ONNX project's own test cases for the operations that numstack has.

Run it with onnx 1.23 installed::

    pip install "onnx==1.23.*"
    python -m tests.golden.make_onnx

Kept are the cases that numstack's operations can express: no class weights in the losses; attention of q, k and v
alone, with or without a causal mask, as many heads in k and v as in q. Cases of more than LARGEST elements are left
out: they say nothing new.
"""

import json
import warnings
from typing import Any

import numpy as np

from tests.golden import ONNX_FILE, OnnxCase

LARGEST = 8192


def _kept(operator: str, attributes: dict[str, Any], node_inputs: list[str], arrays: list[np.ndarray]) -> bool:
    if sum(array.size for array in arrays) > LARGEST:
        return False
    if operator == "SoftmaxCrossEntropyLoss":
        return len(node_inputs) == 2
    if operator == "Attention":
        plain = {"scale", "is_causal", "q_num_heads", "kv_num_heads"}
        if len(node_inputs) != 3 or len(arrays) != 4 or not plain.issuperset(attributes):
            return False
        q, k, v, _ = arrays
        same_heads = attributes.get("q_num_heads") == attributes.get("kv_num_heads")
        return same_heads and q.shape[-1] == k.shape[-1] == v.shape[-1] and (q.ndim == 3 or q.shape[1] == k.shape[1])
    return operator in ("Gemm", "Gelu", "LayerNormalization", "Softmax", "Adam")


def collect() -> dict[str, list[OnnxCase]]:
    """The cases of every operator, from the installed onnx."""
    import onnx
    from onnx.backend.test.case.node import collect_testcases

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # cases of other operators overflow on purpose while they are generated
        testcases = collect_testcases(None)
    cases: dict[str, list[OnnxCase]] = {}
    for testcase in testcases:
        if len(testcase.model.graph.node) != 1:
            continue  # the same case again, with the operator written out in simpler ones
        node = testcase.model.graph.node[0]
        attributes = {}
        for attribute in node.attribute:
            value = onnx.helper.get_attribute_value(attribute)
            attributes[attribute.name] = value.decode() if isinstance(value, bytes) else value
        inputs, outputs = testcase.data_sets[0]
        arrays = [*inputs, *outputs]
        if all(isinstance(x, np.ndarray | np.generic) for x in arrays) and _kept(
            node.op_type, attributes, list(node.input), arrays
        ):
            case = OnnxCase(
                testcase.name, attributes, [np.asarray(x) for x in inputs], [np.asarray(y) for y in outputs]
            )
            cases.setdefault(node.op_type, []).append(case)
    return cases


def main() -> None:
    arrays: dict[str, np.ndarray] = {}
    index = []
    for operator, cases in sorted(collect().items()):
        print(f"{operator:26} {len(cases)} cases")
        for case in sorted(cases):
            index.append(
                {
                    "operator": operator,
                    "name": case.name,
                    "attributes": case.attributes,
                    "n_inputs": len(case.inputs),
                    "n_outputs": len(case.outputs),
                }
            )
            arrays |= {f"{case.name}/input{i}": array for i, array in enumerate(case.inputs)}
            arrays |= {f"{case.name}/output{i}": array for i, array in enumerate(case.outputs)}
    np.savez_compressed(ONNX_FILE, index=np.asarray(json.dumps(index)), **arrays)
    print(f"{ONNX_FILE}: {ONNX_FILE.stat().st_size} bytes")


if __name__ == "__main__":
    main()
