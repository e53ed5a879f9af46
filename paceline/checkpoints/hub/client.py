"""Models of the hub: resolving names there, and fetching and checking files.

Two requests of the hub's protocol are used, both GET::

    <endpoint>/api/models/<org/repo>/revision/<name>?blobs=true    commit; names, sizes, digests
    <endpoint>/<org/repo>/resolve/<commit>/<file>                  a file, from any byte on (Range)

The endpoint is HF_ENDPOINT's, for mirrors, else https://huggingface.co. The token (HF_TOKEN, or
that of ``hf auth login``) is sent to the endpoint only: files often lie on other hosts, and a
redirection to one drops it. Messages contain neither a token nor a redirection's address, which may
be signed.

The hub's own client is not used for this: it restarts a broken download and checks sizes only.

Source: docs of the Hub API and huggingface_hub's cache.
"""

from __future__ import annotations

import http.client
import logging
import os
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from email.message import Message
from pathlib import Path
from typing import IO, Any, Final

from paceline.checkpoints.hub.cache import HubCache, HubFile
from paceline.checkpoints.hub.environment import is_offline, token
from paceline.checkpoints.hub.names import HubReference, Selection, select
from paceline.checkpoints.hub.pip_models import Progress
from paceline.checkpoints.model.json_file import parse_json_object
from paceline.errors import CheckpointError

__all__ = ["Hub", "Listing", "hub_model"]

_log = logging.getLogger(__name__)

DEFAULT_ENDPOINT: Final = "https://huggingface.co"
_CHUNK: Final = 1 << 20
_MAX_LISTING: Final = 32 << 20
_TIMEOUT_S: Final = 30.0
# pauses before attempts, s; they start over after an attempt that brought bytes
_PAUSES_S: Final = (0.5, 1.0, 2.0, 4.0)


@dataclass(frozen=True, slots=True)
class Listing:
    """Current commit and files of a repository."""

    commit: str
    files: dict[str, HubFile]


@dataclass(frozen=True, slots=True)
class Hub:
    """The hub that models come from. Methods raise CheckpointError for what the hub refuses, and
    OSError where it cannot be reached."""

    endpoint: str
    token: str | None = field(default=None, repr=False)
    pauses: tuple[float, ...] = _PAUSES_S

    @staticmethod
    def of_environment() -> Hub:
        """Return the hub of HF_ENDPOINT, with the token that huggingface_hub would use."""
        endpoint = (os.environ.get("HF_ENDPOINT") or DEFAULT_ENDPOINT).rstrip("/")
        if urllib.parse.urlsplit(endpoint).scheme not in ("http", "https"):
            raise CheckpointError(f"HF_ENDPOINT is {endpoint!r:.200}, not an http(s) address")
        return Hub(endpoint, token())

    def list(self, repo: str, revision: str = "main") -> Listing:
        quoted = urllib.parse.quote(revision, safe="")
        url = f"{self.endpoint}/api/models/{repo}/revision/{quoted}?blobs=true"
        for pause in (*self.pauses, None):
            try:
                with self._open(repo, url) as response:
                    text = response.read(_MAX_LISTING)
                break
            except (OSError, http.client.HTTPException) as error:
                if pause is None:
                    raise OSError(_reason(error)) from None
                time.sleep(pause)
        try:
            fields = parse_json_object(text, url)
            files = dict(_hub_file(each) for each in fields["siblings"])
            return Listing(_hexadecimal(fields["sha"]), files)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"{url} gave an answer that is not a model hub's: {error!r:.200}"
            ) from None

    def fetch(self, repo: str, commit: str, file: HubFile, part: IO[bytes]) -> Iterator[int]:
        """Append to ``part``, which holds the file's first bytes, until it is complete; yield the
        bytes it holds. If the server restarts at the first byte, so does this."""
        quoted = urllib.parse.quote(file.name)
        url = f"{self.endpoint}/{repo}/resolve/{commit}/{quoted}"
        pauses = iter(self.pauses)
        done = part.seek(0, os.SEEK_END)
        if done > file.size:
            done = part.truncate(part.seek(0))
        while done < file.size:
            reason = "the connection ended early"
            try:
                with self._open(repo, url, done) as response:
                    if done and response.status != http.client.PARTIAL_CONTENT:
                        done = part.truncate(part.seek(0))
                    while chunk := response.read(min(_CHUNK, file.size - done)):
                        done += part.write(chunk)
                        pauses = iter(self.pauses)
                        yield done
            except (OSError, http.client.HTTPException) as error:
                reason = _reason(error)
            if done < file.size:
                pause = next(pauses, None)
                if pause is None:
                    raise OSError(f"{file.name} came to {done} of {file.size} bytes: {reason}")
                time.sleep(pause)

    @contextmanager
    def _open(self, repo: str, url: str, start: int = 0) -> Iterator[Any]:
        headers = {"User-Agent": "paceline"}
        if self.token:
            headers["Authorization"] = f"Bearer {self.token}"
        if start:
            headers["Range"] = f"bytes={start}-"
        opener = urllib.request.build_opener(_TokenStays)
        try:
            request = urllib.request.Request(url, headers=headers)
            with opener.open(request, timeout=_TIMEOUT_S) as response:
                yield response
        except urllib.error.HTTPError as error:
            with error:
                if error.code in (408, 429) or error.code >= 500:
                    raise
                raise CheckpointError(self._refusal(repo, url, error)) from None

    def _refusal(self, repo: str, url: str, error: urllib.error.HTTPError) -> str:
        code = error.headers.get("X-Error-Code", "")
        if code == "GatedRepo":
            token = "with the account of your token" if self.token else "and set HF_TOKEN"
            return f"{repo} is gated: accept its conditions at {self.endpoint}/{repo} {token}"
        if code == "RepoNotFound" or error.code in (401, 404):
            token = "your token may not read it" if self.token else "it is private: set HF_TOKEN"
            return f"{self.endpoint} has no {repo}, or {token}; check the name"
        return f"{url} was refused with status {error.code}"


class _TokenStays(urllib.request.HTTPRedirectHandler):
    """Handler that follows redirections, without the token to other hosts."""

    def redirect_request(
        self,
        req: urllib.request.Request,
        fp: IO[bytes],
        code: int,
        msg: str,
        headers: Message,
        newurl: str,
    ) -> urllib.request.Request | None:
        following = super().redirect_request(req, fp, code, msg, headers, newurl)  # type: ignore[arg-type]
        old, new = urllib.parse.urlsplit(req.full_url), urllib.parse.urlsplit(newurl)
        if following is not None and (old.scheme, old.netloc) != (new.scheme, new.netloc):
            following.remove_header("Authorization")
        return following


def hub_model(
    reference: HubReference,
    *,
    offline: bool = False,
    refresh: bool = False,
    progress: Progress | None = None,
    hub: Hub | None = None,
) -> tuple[Path, Selection]:
    """Return the path of the model of ``reference``, fetched if needed, and its files.

    A model that was fetched and checked is used without asking the hub, unless ``refresh`` is true
    and the hub can be reached.

    Raises CheckpointError: there is no such model, a file does not match the hub's digest, or it
    cannot be fetched or stored.
    """
    offline = offline or is_offline()
    cache = HubCache.of(reference.repo)
    known = cache.checked(reference.within)
    if known is not None and (offline or not refresh):
        return known
    if offline:
        return _without_hub(cache, reference, "downloads are off")
    hub = hub or Hub.of_environment()
    try:
        listing = hub.list(reference.repo, reference.revision)
    except OSError as error:
        reason = f"{hub.endpoint} cannot be reached ({error})"
        if known is not None:
            _log.warning("%s: taking what is here; %s", reference.repo, reason)
            return known
        return _without_hub(cache, reference, reason)
    selection = select(reference, listing.files)
    files = [listing.files[name] for name in selection.files]
    try:
        with cache.locked(progress):
            for file, part in cache.missing(files):
                for _ in hub.fetch(reference.repo, listing.commit, file, part):
                    cache.report(part)
            kept = cache.keep(reference, listing.commit, selection, files)
            return kept, selection
    except OSError as error:
        raise CheckpointError(
            f"cannot get {reference.repo} from {hub.endpoint}: {error}. "
            "What came is kept: the same command goes on from there"
        ) from None


def _without_hub(cache: HubCache, reference: HubReference, why: str) -> tuple[Path, Selection]:
    """Find the model among files that another program, or another pull, left in the cache."""
    snapshot, names = cache.snapshot(reference.revision)
    if snapshot is None:
        raise CheckpointError(
            f"cannot get {reference.repo}: {why}, and it is not in the local cache; run `paceline "
            f"pull {reference.repo}` where there is a network"
        )
    try:
        selection = select(reference, names)
    except CheckpointError as error:
        raise CheckpointError(f"{why}, and of the local cache: {error}") from None
    return snapshot / selection.entry, selection


def _hub_file(entry: dict[str, Any]) -> tuple[str, HubFile]:
    """Parse a file's entry. Raises Key-, Type-, Value- or AttributeError if malformed."""
    name, size = entry["rfilename"], entry["size"]
    parts = name.split("/")
    if type(size) is not int or size < 0 or not all(part.strip(".") for part in parts):
        raise ValueError(f"{name!r} of {size!r} bytes")
    if any(ord(character) < 32 or character in "\\:" for character in name):
        raise ValueError(f"{name!r}")
    stored = entry.get("lfs")
    if stored is not None:
        return name, HubFile(name, size, "sha256", _hexadecimal(stored["sha256"], 64))
    return name, HubFile(name, size, "git", _hexadecimal(entry["blobId"]))


def _hexadecimal(text: Any, length: int = 40) -> str:
    if not isinstance(text, str) or len(text) != length or not set(text) <= set("0123456789abcdef"):
        raise ValueError(f"{text!r:.100} is not a digest of {length} digits")
    return text


def _reason(error: Exception) -> str:
    """Describe an error without addresses, which may be signed after a redirection."""
    if isinstance(error, urllib.error.HTTPError):
        return f"status {error.code}"
    if isinstance(error, urllib.error.URLError):
        error = error.reason if isinstance(error.reason, Exception) else error
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return type(error).__name__ if not isinstance(error, TimeoutError) else "timed out"
