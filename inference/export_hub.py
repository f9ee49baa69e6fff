"""Putting an export on the Hugging Face Hub, with the library's client and the user's own login."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from dipaco.modules.errors import ConfigurationError, DipacoError, NetworkError
from huggingface_hub import HfApi, constants
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalTokenNotFoundError

# Hard links of `dipaco-export --all --current`: the paths have these parameters themselves.
_NOT_UPLOADED = ["modules/*"]


class HubRepository:
    """A model repository, made if it is missing. Opened before an export is computed, so that a
    wrong name or login is known first.

    Raises ConfigurationError if the name or the login is wrong, NetworkError if the Hub cannot be
    reached or refuses.
    """

    def __init__(self, name: str, private: bool) -> None:
        self.name = name
        self._api = HfApi()
        with _hub_errors(name):
            self._api.create_repo(name, repo_type="model", private=private, exist_ok=True)

    def upload(self, folder: Path, message: str, say: Callable[[str], None]) -> str:
        """Upload what is in `folder` as one commit; return its address. Raises NetworkError."""
        say(f"uploading {folder} to {self.name}")
        with _hub_errors(self.name):
            commit = self._api.upload_folder(
                repo_id=self.name,
                folder_path=folder,
                repo_type="model",
                commit_message=message,
                ignore_patterns=_NOT_UPLOADED,
            )
        return str(commit.commit_url)


@contextmanager
def _hub_errors(name: str) -> Iterator[None]:
    """Turn the library's errors into one line each."""
    try:
        yield
    except HFValidationError as error:  # a ValueError
        raise ConfigurationError(
            f"--push-to-hub '{name}' is no name of a repository ({error}); write OWNER/NAME"
        ) from None
    except LocalTokenNotFoundError:
        raise ConfigurationError(
            "the Hub does not know you; log in with 'hf auth login', or set HF_TOKEN"
        ) from None
    except ValueError as error:  # so the library says what the Hub finds wrong in the card's header
        raise ConfigurationError(
            f"the Hub does not take the model card: {' '.join(str(error).split())}; look at "
            f"--licence, --base-model and --dataset"
        ) from None
    except HfHubHTTPError as error:
        status = getattr(error.response, "status_code", None)
        if status in (401, 403):
            raise ConfigurationError(
                f"the Hub does not let you write to '{name}' ({status}); log in with "
                f"'hf auth login' as somebody who may, or set HF_TOKEN"
            ) from None
        raise NetworkError(
            f"the Hub refused '{name}': {str(error).splitlines()[0]}; try again"
        ) from None
    except DipacoError:
        raise
    except Exception as error:  # whatever the library's HTTP client raises
        raise NetworkError(
            f"the Hub ({constants.ENDPOINT}) cannot be used: {type(error).__name__}: {error}; an "
            f"export that was written stays, and the same command goes on from there"
        ) from None
