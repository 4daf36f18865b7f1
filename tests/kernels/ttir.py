"""Evaluates the TTIR of a compiled kernel with numpy: what a GPU would run, sort and all, tested without one.

A value is an array [programs or 1, *shape] of signed integers or floats (bf16 as its bits). A pointer is an int64,
buffer << 44 | byte offset, so that buffers may be of any size. All programs go through one operation after the other.
An error is whatever is unknown here, and whatever a GPU need not do the same way each time: an access outside of its
buffer, misaligned, or to a buffer written since the last barrier, two lanes that write to one address, a shift too far.
"""

import operator
import re

import numpy as np

_DTYPES = {"i1": bool, "i8": np.int8, "i16": np.int16, "i32": np.int32, "i64": np.int64, "bf16": np.int16}
_DTYPES |= {"f16": np.float16, "f32": np.float32, "f64": np.float64}
_LOCATION = re.compile(r" loc\((?:[^()]|\((?:[^()]|\([^()]*\))*\))*\)")
_ATTRIBUTES = re.compile(r"<?\{(.*?)\}>?")
_TYPE = re.compile(r"(?:tensor<((?:\d+x)*))?(!tt\.ptr<)?(i\d+|bf16|f\d+)\b")
_LOOP = re.compile(r"(%\w+)(?::\d+)? = scf\.for (\S+) = (\S+) to (\S+) step (\S+) iter_args\((.*?)\) .*: i32 {")
_BASE = 44  # bits of a byte offset


def _unsigned(x):
    return x.view(np.uint8 if x.dtype == bool else f"u{x.itemsize}")


def _shift(shift, look=lambda x: x):
    def apply(x, count):
        assert ((count >= 0) & (count < 8 * x.itemsize)).all(), "a shift by the width or more"
        return shift(look(x), look(count)).view(x.dtype)

    return apply


def _multiply_high(a, b):
    assert a.dtype == b.dtype == np.int32
    return (_unsigned(a).astype(np.uint64) * _unsigned(b) >> np.uint64(32)).astype(np.int32)


def _bfloat16(x):
    """The bits of float32 numbers rounded to bfloat16, to nearest, ties to even."""
    bits = x.view(np.uint32)
    return (bits + 0x7FFF + (bits >> 16 & 1) >> 16).astype(np.int16)


_ARITHMETIC = {f"arith.{name}i": getattr(np, f"bitwise_{name}") for name in ("and", "or", "xor")}
_ARITHMETIC |= {f"arith.{name}{t}": getattr(operator, name) for name in ("add", "sub", "mul") for t in "if"}
_ARITHMETIC |= {"arith.minsi": np.minimum, "arith.maxsi": np.maximum, "arith.divf": operator.truediv}
_ARITHMETIC |= {
    "arith.remsi": np.fmod,
    "arith.divsi": lambda a, b: (a - np.fmod(a, b)) // b,
    "tt.mulhiui": _multiply_high,
}
_ARITHMETIC |= {"arith.shli": _shift(np.left_shift), "arith.shrsi": _shift(np.right_shift)}
_ARITHMETIC["arith.shrui"] = _shift(np.right_shift, _unsigned)
_ARITHMETIC |= {"arith.maxnumf": np.fmax, "math.sqrt": np.sqrt, "math.exp2": np.exp2}


def _parse(lines):
    """The operations up to the end of this block: (operation, result, operands, words, attributes, types, block)."""
    block = []
    for line in lines:
        if line.startswith("}"):
            return block, line
        if loop := _LOOP.fullmatch(line):
            result, *bounds, carried = loop.groups()
            block.append(("scf.for", result, [*bounds, *re.findall(r"%\w+", carried)], [], {}, [], _parse(lines)[0]))
        elif line.startswith("^bb0"):
            block.append(("arguments", None, re.findall(r"(%\S+):", line), [], {}, [], None))
        elif line:
            inner, end = _parse(lines) if line.endswith("({") else (None, "")
            line = line.removesuffix("({") + end.removeprefix("})")
            attributes = dict(pair.split(" = ") for text in _ATTRIBUTES.findall(line) for pair in text.split(", "))
            head, *types = re.split(" : ", _ATTRIBUTES.sub("", line), maxsplit=1)
            result, _, head = head.rpartition(" = ")
            operation, *words = re.findall(r'[^\s,()"]+', head)
            operands = [word for word in words if word[0] == "%"]
            words = [word for word in words if word[0] != "%"]
            types = _TYPE.findall(*types) if types else []
            types = [(tuple(map(int, dims.split("x")[:-1])), bool(ptr), _DTYPES[name]) for dims, ptr, name in types]
            attributes = {name: int(re.search(r"-?\d+", value)[0]) for name, value in attributes.items()}
            block.append((operation, result, operands, words, attributes, types, inner))


def evaluate(ttir, arguments, programs):
    """Run ``programs``, a list of (x, y), on ``arguments``: numbers, and contiguous arrays, changed in place."""
    lines = iter([_LOCATION.sub("", line).strip() for line in ttir.splitlines()])
    parameters = next(re.findall(r"(%\w+): (\S+?)[ ,)]", line) for line in lines if line.startswith("tt.func"))
    buffers, dirty, env = {}, set(), {}
    for number, ((name, kind), value) in enumerate(zip(parameters, arguments, strict=True), 1):
        if isinstance(value, np.ndarray):
            assert kind.startswith("!tt.ptr") and value.flags.c_contiguous, name
            buffers[number], env[name] = value.reshape(-1).view(np.uint8), np.array([number << _BASE])
        else:
            env[name] = np.array([value], _DTYPES[kind])

    def access(pointers, mask, dtype):
        """The buffer that the pointers (where ``mask``) point into, and their places in it as an array of ``dtype``."""
        (numbers, offsets), size = np.divmod(pointers[mask], 1 << _BASE), np.dtype(dtype).itemsize
        number = int(numbers[0])
        buffer = buffers[number]
        assert (numbers == number).all() and (offsets + size <= len(buffer)).all(), "outside of the buffer"
        assert (offsets % size == 0).all(), "misaligned"
        return number, buffer[: len(buffer) // size * size].view(dtype), offsets // size

    def load(dtype, pointers, mask=True, other=-0x55):
        pointers, mask, other = np.broadcast_arrays(pointers, mask, other)
        values = other.astype(dtype)
        if mask.any():
            number, buffer, places = access(pointers, mask, dtype)
            assert number not in dirty, "no barrier since the buffer was written"
            values[mask] = buffer[places]
        return values

    def store(dtype, pointers, values, mask=True):
        shape = len(programs), *pointers.shape[1:]
        pointers, values, mask = (np.broadcast_to(x, shape) for x in (pointers, values, mask))
        if mask.any():
            number, buffer, places = access(pointers, mask, dtype)
            assert len(np.unique(places)) == len(places), "two lanes write to one address"
            buffer[places] = values[mask]
            dirty.add(number)

    def run(block, inputs=()):
        for operation, result, operands, words, attributes, types, inner in block:
            if operation == "arguments":
                env.update(zip(operands, inputs, strict=True))
                continue
            if operation == "scf.for":
                name, *bounds = operands[:4]
                values = [env[x] for x in operands[5::2]]
                for i in range(*(env[x].item() for x in bounds)):
                    env.update({name: np.array([i], np.int32)} | dict(zip(operands[4::2], values, strict=True)))
                    values = run(inner)
                names = [result] if len(values) == 1 else [f"{result}#{place}" for place in range(len(values))]
                env.update(zip(names, values, strict=True))
                continue
            args = [env[x] for x in operands]
            shape, pointer, dtype = types[-1] if types else ((), False, None)
            axis = attributes.get("axis", 0) + 1
            match operation, words:
                case "scf.yield", []:
                    return args
                case "tt.reduce.return", []:
                    return args[0]
                case "tt.return", []:
                    return None
                case ("ttg.barrier", ["all"]) | ("gpu.barrier", []):
                    dirty.clear()
                    continue
                case "tt.store", []:
                    store(types[0][2], *args)
                    continue
                case "arith.constant", [text]:
                    text = text.removeprefix("dense<").rstrip(">")
                    number = np.uint32(int(text, 16)).view(dtype) if text.startswith("0x") else float(text)
                    if np.dtype(dtype).kind != "f":  # an integer, or bfloat16
                        number = _bfloat16(np.array([number], np.float32))[0] if "." in text else int(text)
                    value = np.full((1, *shape), number, dtype)
                case "tt.get_program_id", [("x" | "y") as word]:
                    value = np.array([p["xy".index(word)] for p in programs], np.int32)
                case "tt.make_range", []:
                    value = np.arange(attributes["start"], attributes["end"], dtype=np.int32)[None]
                case "tt.splat", []:
                    value = args[0].reshape(-1, *[1] * len(shape))
                    value = np.broadcast_to(value, (len(value), *shape))
                case "tt.broadcast", []:
                    value = np.broadcast_to(args[0], (len(args[0]), *shape))
                case "tt.reshape", []:
                    value = args[0].reshape(-1, *shape)
                case "tt.expand_dims", []:
                    value = np.expand_dims(args[0], axis)
                case "tt.join", []:
                    value = np.stack(np.broadcast_arrays(*args), -1)
                case "tt.reduce", []:
                    value, *rest = np.moveaxis(args[0], axis, 0)
                    for other in rest:
                        value = run(inner, (value.ravel(), other.ravel())).reshape(value.shape)
                case "tt.addptr", []:
                    shape, pointer, dtype = types[0]
                    value = args[0] + args[1].astype(np.int64) * np.dtype(dtype).itemsize
                case "tt.load", []:
                    value, pointer = load(dtype, *args), False
                case "tt.bitcast", []:
                    value = args[0] if pointer else args[0].view(dtype)
                case "arith.cmpi", [("eq" | "ne" | "slt" | "sle" | "sgt" | "sge") as word]:
                    value, dtype = getattr(operator, word.removeprefix("s"))(*args), bool
                case "arith.cmpf", [("ogt" | "olt") as word]:
                    value, dtype = getattr(operator, word.removeprefix("o"))(*args), bool
                case "arith.select", []:
                    value = np.where(*args)
                case (("arith.extsi" | "arith.sitofp" | "arith.trunci"), []):
                    assert types[0][2] is not bool and dtype is not bool
                    value = args[0].astype(dtype)
                case (("arith.extui" | "arith.uitofp"), []):
                    value = _unsigned(args[0]).astype(dtype)
                case "arith.extf", []:
                    half = args[0].dtype == np.int16
                    value = (args[0].astype(np.int32) << 16).view(np.float32) if half else args[0].astype(dtype)
                case "arith.truncf", []:
                    value = _bfloat16(args[0]) if dtype is np.int16 else args[0].astype(dtype)
                case _, [] if operation in _ARITHMETIC:
                    value = _ARITHMETIC[operation](*args)
                case _:
                    raise NotImplementedError(f"{operation} {words}")
            dtype = np.int64 if pointer else dtype
            assert value.shape[1:] == shape and value.dtype == dtype, (operation, value.shape, value.dtype, types)
            env[result] = value

    with np.errstate(all="ignore"):  # a GPU says nothing either
        run(_parse(lines)[0])
