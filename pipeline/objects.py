"""Objects of S3, or of a store that speaks its protocol: one request each, by obstore, with the credentials that boto3
finds (and renews) as all tools of AWS do. Without credentials requests are not signed, as public buckets want it."""

import datetime
import errno
import functools
import os
import re
import threading
from collections.abc import Sequence

import numpy as np

if __package__:
    from pipeline.latency import Threads
else:  # see headers.py
    from latency import Threads

SCHEME = "s3://"
GONE = "no such object"
AT_A_TIME = 256  # requests of a process
WAIT = 30  # seconds until something comes, and within which a request that failed is tried again
_LONGEST = 300  # seconds until an object has come whole: 100 MB from a slow store
_CONNECT = 5  # seconds until there is a connection
# Attempts after the first, with growing pauses. A store that is asked too much refuses a share of all requests. Where
# that is half of them, one image of 16 is still unread after 3 more attempts, and one of 500 after 8; a batch of 512
# needs all of its images.
RETRIES = 8
_FRESH = datetime.timedelta(minutes=10)  # after which boto3 is asked again for credentials, which it renews when due
# What an error of obstore says: a status, and the code and message in S3's answer; or what went wrong on the way, of
# which the first below counts.
_ANSWER = [
    re.compile(pattern, re.DOTALL)
    for pattern in (r"status code: (\d+[ \w]*)", r"<Code>\s*(.*?)\s*</Code>", r"<Message>\s*(.*?)\s*</Message>")
]
_BUCKET = re.compile(r"[\w.-]+", re.ASCII)
_OTHER_KEY = re.compile(r"(^|/)\.{0,2}(/|$)|[\0-\x1f\x7f\ud800-\udfff]")  # what obstore refuses, or would change
_ODD = "an empty, . or .. part, or a control character"
_NO_PATH = re.compile(r'invalid path: .*?Path "(.*?)"(?: contained|: )', re.DOTALL)
_FROM = "External AWS credential provider: "  # what follows is said by boto3
_ELSEWHERE = "the bucket is in another region; expected AWS_REGION to name it"
_WRONG = {  # what stands in an error: what to say of it; where no waiting helps
    "without LOCATION": _ELSEWHERE,
    "Name or service not known": "there is no such host; expected AWS_ENDPOINT_URL, or AWS_REGION, of a store",
    "InvalidCertificate": "its certificate is not trusted; expected SSL_CERT_FILE to name that of who signed it",
    "InvalidContentType": "it does not speak TLS; expected http:// in AWS_ENDPOINT_URL",
}
_WAYS = {  # likewise, of what may pass
    "kind: Connect": "cannot connect",
    "kind: Timeout": f"no answer in {WAIT} s",
    "kind: Interrupted": "the answer breaks off",
    "kind: Decode": "the answer breaks off",
    "kind: Request": "the connection breaks off",
}
# Statuses that may pass, unlike 501 of a server that is no store; and 416, which an empty object gives.
_PASSES = re.compile("408|416|429|5(?!01)")
_TRIED = 5  # objects that are asked for at a start, unless the first one comes
_lock = threading.Lock()


def ready(uris: Sequence[str] = ()) -> None:
    """Looks, at a start, whether objects can be read: ValueError where what reads them is not installed, credentials
    that are configured are missing, or AWS_ENDPOINT_URL is no address, which would end obstore's process; OSError in
    one line where the store refuses a few of ``uris`` for a reason that no waiting changes."""
    _credentials()
    where = os.environ.get("AWS_ENDPOINT_URL", "http://host")
    if not re.match("https?://[^/]", where):
        raise ValueError(f"AWS_ENDPOINT_URL {where!r}: expected http://HOST or https://HOST, or that it is not set")
    _answers(lambda store, key: store.get_range(key, start=0, length=1), some(uris), folder=False)


def some(things: Sequence) -> Sequence:
    """A few of many, from first to last."""
    return things[:: -(-len(things) // _TRIED) or 1]


def parsed(uri: str, *, folder: bool = False) -> tuple[str, str]:
    """Bucket and key of an s3:// URI, or of a ``folder``, where there may be none; ValueError for one that obstore does
    not take as it is."""
    bucket, _, key = uri.removeprefix(SCHEME).partition("/")
    if folder:
        key = key.strip("/")
    if not _BUCKET.fullmatch(bucket) or (_OTHER_KEY.search(key) and (key or not folder)):
        what, part = ("BUCKET/FOLDER", "folder") if folder else ("BUCKET/KEY", "key")
        raise ValueError(
            f"got {uri!r}; expected {SCHEME}{what}, whose {part} has no empty, . or .. part, no control character, and "
            "is UTF-8"
        )
    return bucket, key


def bucket_of(uri: str) -> str:
    """s3://BUCKET/, with which the URIs of all objects of a bucket begin, from one of them."""
    return "/".join(uri.split("/")[:3]) + "/"


def get(uri: str, offset: int = 0, length: int = -1) -> np.ndarray:
    """``length`` bytes of an object from ``offset`` on, or all: uint8 [bytes]; OSError as by ``_asked``."""
    whole = not offset and length < 0

    def request(store, key):
        return store.get(key).bytes() if whole else store.get_range(key, start=offset, length=length)

    return np.frombuffer(_asked(request, *parsed(uri)), np.uint8)


def begin(uri: str, length: int) -> tuple[bytes, int]:
    """The first bytes of an object, at most ``length``, and its size, by one request; OSError as by ``_asked``."""

    def request(store, key):
        answer = store.get(key, options={"range": (0, length)})
        return bytes(answer.bytes()), answer.meta["size"]

    try:
        return _asked(request, *parsed(uri))
    except OSError as error:
        if error.strerror.startswith("416"):  # an empty object has no first byte
            return b"", 0
        raise


def state(uri: str) -> list[int]:
    """Bytes and time of change in ns of an object, by one request; OSError as by ``_asked``."""
    return _asked(lambda store, key: _stamp(store.head(key)), *parsed(uri))


def listed(uri: str) -> list[tuple[str, int, int]]:
    """Key, bytes and time of change in ns of all objects of a bucket, or of those below s3://BUCKET/FOLDER, by a
    request for each thousand of them; OSError as by ``_asked``."""

    def request(store, folder):
        pages = store.list(folder or None, chunk_size=1000)
        return [(one["path"], *_stamp(one)) for page in pages for one in page]

    _answers(lambda store, folder: next(iter(store.list(folder or None)), None), [uri], folder=True)
    try:
        return _asked(request, *parsed(uri, folder=True))
    except OSError as error:
        if error.errno == errno.EINVAL:
            raise ValueError(f"{uri}: {error.strerror}; expected another folder, or a list of the images") from None
        error.filename = uri
        raise


def _stamp(meta):
    return [meta["size"], int(meta["last_modified"].timestamp() * 1e3) * 10**6]


def _answers(request, uris, folder):
    """OSError, in one line, where the request is refused for all of ``uris`` and no waiting helps."""
    refused = []
    for uri in uris:
        try:
            _asked(request, *parsed(uri, folder=folder), start=True)
        except OSError as error:
            if error.errno == errno.EACCES:
                refused.append(error.strerror)
                continue
        return
    if refused:
        hint = "" if "expected" in refused[0] else "; expected credentials, AWS_REGION and AWS_ENDPOINT_URL that fit it"
        raise OSError(f"{uris[0]} cannot be read: {refused[0]}{hint}")


def _asked(request, bucket, key, *, start=False):
    """What a request for a key gives.

    OSError where it fails. ENOENT: the store says that there is no such object. EACCES (see ``graph.UNCLEAR``): there
    is no such bucket, or it is in another region, or access is forbidden, which is also the answer for a missing object
    to those who may not list the bucket. EREMOTEIO: what may pass by itself, or when somebody mends it; at a ``start``,
    where nothing is tried again, what somebody has to mend is EACCES too.
    """
    with _lock:
        store = _store(bucket, 0 if start else RETRIES)
    try:
        if threading.current_thread() is not threading.main_thread():
            return request(store, key)
        with Threads(1) as aside:  # until obstore has an answer, no signal is heard where it is called
            return aside.submit(request, store, key).result()
    except (FileNotFoundError, _client().exceptions.BaseError) as error:
        raise _said(error, start) from None


@functools.cache
def _client():
    try:
        import boto3  # noqa: F401
        import obstore.store
    except ImportError as error:
        raise ValueError(
            f"{SCHEME} is read by obstore and boto3, of which {error.name} is not installed; expected "
            "pip install -e '.[s3]'"
        ) from None
    return obstore


@functools.cache
def _credentials():
    """What gives obstore credentials and the region; None where boto3 finds no credentials."""
    _client()
    from botocore.exceptions import BotoCoreError
    from obstore.auth.boto3 import Boto3CredentialProvider

    try:
        return Boto3CredentialProvider(ttl=_FRESH)
    except BotoCoreError as error:
        raise ValueError(f"credentials for {SCHEME}: {error}; expected what the AWS CLI takes") from None
    except ValueError:
        return None


@functools.cache
def _store(bucket, retries):
    seconds = {"read_timeout": WAIT, "timeout": _LONGEST, "connect_timeout": _CONNECT}
    options = {name: datetime.timedelta(seconds=value) for name, value in seconds.items()}
    again = {"max_retries": retries, "retry_timeout": datetime.timedelta(seconds=WAIT)}
    who = {"credential_provider": _credentials()} if _credentials() else {"skip_signature": True}
    return _client().store.S3Store(bucket, client_options=options | {"allow_http": True}, retry_config=again, **who)


def _said(error, start):
    """The OSError for an error of obstore, by its text: its type is the same for nearly all that can be wrong."""
    text = str(error)
    status, code, message = (found[1] if (found := pattern.search(text)) else "" for pattern in _ANSWER)
    if odd := _NO_PATH.search(text):  # of which obstore says nothing more, not even what was listed before it
        return OSError(errno.EINVAL, f"the key {odd[1]!r} ends the listing by {_ODD}, and has to be renamed")
    if code == "NoSuchKey":
        return OSError(errno.ENOENT, GONE)
    if status:
        said = ": ".join(filter(None, (status, code, message.rstrip("."))))
        lasts = not _PASSES.match(status) and code != "RequestTimeout"
    else:
        said = next((way for mark, way in (_WRONG | _WAYS).items() if mark in text), None)
        said = said or text.splitlines()[0].rpartition(_FROM)[2]
        lasts = said in _WRONG.values()
    elsewhere = said is _ELSEWHERE or code == "AuthorizationHeaderMalformed"  # the latter names the region
    refused = elsewhere or status[:3] in ("401", "403", "404") or _FROM in text or (start and lasts)
    return OSError(errno.EACCES if refused else errno.EREMOTEIO, said)
