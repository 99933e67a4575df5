"""A Hub on loopback: the endpoints huggingface_hub calls, over real HTTP, with faults that can be ordered.

Repositories are commits of files; large files lie in a store of blobs by SHA-256, as on the real Hub. ``fault`` makes
the next requests of a kind fail: with a status, by a connection that is cut in the middle, or with wrong bytes.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, quote, unquote, urlsplit

from tests.hub.repository import Entry, Files, Repo
from tests.hub.xet_store import xet_file

PAGE = 7
"""Entries of a page of a listing; small, so that paging is always met."""

LFS_SUFFIXES = (".safetensors", ".bin", ".png")
PART_BYTES = 200_000


@dataclass
class Fault:
    """What goes wrong, how often, with which requests.

    Attributes:
        method: Of the request.
        path: Searched for in its path and query.
        status: Answered instead, if any.
        headers: With it.
        cut: After so many bytes of the body, sent or received, the connection is dropped.
        corrupt: Changes the body that is sent.
        times: How often.
        after: Requests let through first.
        whole: Only requests for whole files, not for ranges.
        lost: The request is carried out, and the connection dropped instead of the answer.
    """

    method: str
    path: str
    status: int | None = None
    headers: dict[str, str] = field(default_factory=dict)
    cut: int | None = None
    corrupt: Callable[[bytes], bytes] | None = None
    times: int = 1
    after: int = 0
    whole: bool = False
    lost: bool = False
    met: int = 0


class Hub:
    """The state of the server, and what was asked of it."""

    def __init__(self) -> None:
        self.repos: dict[str, Repo] = {}
        self.blobs: dict[str, bytes] = {}
        self.parts: dict[str, dict[int, bytes]] = {}
        self.faults: list[Fault] = []
        self.requests: list[tuple[str, str]] = []
        self.tokens: set[str | None] = set()
        self.cdn_tokens: set[str | None] = set()
        """Sent to where large files lie, which on the real Hub is another host."""
        self.sent: dict[str, int] = {}
        """Bytes of each path of a repository that went out."""
        self.received_bytes = 0
        """Of large files."""
        self.ignored: set[str] = set()
        """Paths the repository's .gitignore names."""
        self.signature = "Signature=abc"
        """In the query of the URLs that large files are sent to and come from."""
        self.cas: str | None = None
        """``local://`` folder that hf_xet stores in; None: a Hub without Xet."""
        self.hook: Callable[[str, str], None] = lambda method, path: None
        """Called with method and path of each request first; the method of one for a part is ``RANGE``."""
        self.lock = threading.RLock()
        self.url = ""
        self.cdn_url = ""
        """The same server by another name, as large files of the real Hub come from another host."""

    def fault(self, method: str, path: str, **what: Any) -> Fault:
        made = Fault(method, path, **what)
        self.faults.append(made)
        return made

    def take_fault(self, method: str, path: str, ranged: bool) -> Fault | None:
        with self.lock:
            for fault in self.faults:
                if fault.method == method and re.search(fault.path, path) and fault.times > 0:
                    if fault.whole and ranged:
                        continue
                    if fault.after > 0:
                        fault.after -= 1
                        continue
                    fault.times -= 1
                    fault.met += 1
                    return fault
        return None

    def add(self, repo_id: str, files: dict[str, bytes | Entry], branch: str = "main", *, whole: bool = True) -> str:
        """Put a commit there without HTTP; returns it."""
        repo = self.repos.setdefault(repo_id, Repo(False))
        old = {} if whole or branch not in repo.branches else repo.commits[repo.branches[branch]]
        made = {
            path: data if isinstance(data, Entry) else Entry(data, path.endswith(LFS_SUFFIXES))
            for path, data in files.items()
        }
        return repo.commit(branch, "put", {**old, **made}, sorted(files))

    def files(self, repo_id: str, revision: str = "main") -> dict[str, bytes]:
        repo = self.repos[repo_id]
        found = repo.find(revision)
        assert found is not None
        return {path: entry.data for path, entry in repo.commits[found].items()}


class Handler(BaseHTTPRequestHandler):
    """One request."""

    protocol_version = "HTTP/1.1"
    hub: Hub
    _fault: Fault | None

    def log_message(self, *_: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self._handle()

    def do_GET(self) -> None:
        self._handle()

    def do_POST(self) -> None:
        self._handle()

    def do_PUT(self) -> None:
        self._handle()

    def _handle(self) -> None:
        hub, path = self.hub, unquote(urlsplit(self.path).path)
        with hub.lock:
            hub.requests.append((self.command, path))
            token = (self.headers.get("Authorization") or "").removeprefix("Bearer ") or None
            outside = path.startswith("/cdn/") or self.command == "PUT" or path.endswith("/complete")
            (hub.cdn_tokens if outside else hub.tokens).add(token)
        hub.hook("RANGE" if "Range" in self.headers else self.command, path)
        self._fault = fault = hub.take_fault(self.command, unquote(self.path), "Range" in self.headers)
        try:
            if fault is not None and fault.cut is not None and self.command in ("PUT", "POST"):
                self.rfile.read(min(fault.cut, int(self.headers.get("Content-Length") or 0)))
                raise ConnectionAbortedError
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            if self.headers.get("Transfer-Encoding") == "chunked":
                body = b"".join(self._chunks())
            if fault is not None and fault.status is not None:
                self._send(fault.status, b'{"error": "ordered"}', fault.headers)
                return
            self._route(path, body)
        except (ConnectionError, TimeoutError):
            self.close_connection = True
            self.connection.close()

    def _chunks(self) -> Iterator[bytes]:
        while size := int(self.rfile.readline(), 16):
            yield self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()

    def _send(self, status: int, body: bytes = b"", headers: dict[str, str] | None = None) -> None:
        fault = self._fault
        if fault is not None and fault.lost:
            raise ConnectionAbortedError
        if fault is not None and fault.corrupt is not None:
            body = fault.corrupt(body)
            headers = {key: value for key, value in (headers or {}).items() if key != "Content-Length"}
        self.send_response(status)
        given = headers or {}
        for name, value in given.items():
            self.send_header(name, value)
        if "Content-Length" not in given:
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "HEAD":
            return
        if fault is not None and fault.cut is not None:
            self.wfile.write(body[: fault.cut])
            self.wfile.flush()
            raise ConnectionAbortedError
        self.wfile.write(body)

    def _json(self, document: Any, status: int = 200, headers: dict[str, str] | None = None) -> None:
        self._send(status, json.dumps(document).encode(), {"Content-Type": "application/json", **(headers or {})})

    def _error(self, status: int, code: str) -> None:
        self._json({"error": code}, status, {"X-Error-Code": code, "X-Error-Message": code})

    def _route(self, path: str, body: bytes) -> None:
        table: list[tuple[str, str, Callable[..., None]]] = [
            ("POST", r"/api/repos/create", self._create),
            ("POST", r"/api/validate-yaml", lambda _: self._json({"errors": [], "warnings": []})),
            ("POST", r"/([^/]+/[^/]+)\.git/info/lfs/objects/batch", self._batch),
            ("PUT", r"/lfs/(\w+)(?:/(\d+))?", self._put),
            ("POST", r"/lfs/(\w+)/complete", self._complete),
            ("POST", r"/lfs/(\w+)/verify", self._verify),
            ("GET", r"/cdn/(\w+)", self._cdn),
            ("HEAD", r"/cdn/(\w+)", self._cdn),
            ("GET", r"/api/models/([^/]+/[^/]+)/discussions/(\d+)", self._discussion),
        ]
        for method, pattern, answer in table:
            match = re.fullmatch(pattern, path)
            if match and method == self.command:
                answer(body, *match.groups())
                return
        match = re.match(r"(?:/api/models)?/([^/]+/[^/]+?)(?:/(.*))?$", path, re.S)
        repo = self.hub.repos.get(match[1]) if match else None
        if match is None or repo is None:
            self._error(404, "RepoNotFound")
            return
        self._of_repo(match[1], repo, match[2] or "", path.startswith("/api/"), body)

    def _of_repo(self, repo_id: str, repo: Repo, rest: str, api: bool, body: bytes) -> None:
        what, _, tail = rest.partition("/")
        if api and what == "branch":
            self._branch(repo, tail, body)
            return
        if api and what == "discussions":
            number = 1 + sum(name.startswith("refs/pr/") for name in repo.branches)
            repo.branches[f"refs/pr/{number}"] = repo.branches["main"]
            self._json({"num": number})
            return
        if api and what == "refs":
            refs = [{"name": n, "ref": f"refs/heads/{n}", "targetCommit": c} for n, c in repo.branches.items()]
            self._json({"branches": refs, "tags": [], "converts": [], "pullRequests": []})
            return
        revision, inner = self._revision(repo, tail if what else "main")
        commit = repo.find(revision)
        if commit is None:
            self._error(404, "RevisionNotFound")
        elif not api and what == "resolve":
            self._resolve(repo_id, commit, repo.commits[commit], inner)
        elif what in ("", "revision"):
            names = [{"rfilename": path} for path in repo.commits[commit]]
            self._json({"id": repo_id, "sha": commit, "private": repo.private, "siblings": names})
        elif what == "tree":
            self._tree(repo.commits[commit], repo_id, revision)
        elif what == "paths-info":
            wanted = parse_qs(body.decode()).get("paths", [])
            files = repo.commits[commit]
            self._json([files[path].listing(path) for path in wanted if path in files])
        elif what == "preupload":
            self._preupload(repo.commits[commit], json.loads(body))
        elif what == "commit":
            self._commit(repo_id, repo, revision, body)
        elif re.fullmatch(r"xet-(read|write)-token", what) and self.hub.cas is not None:
            token = {"casUrl": self.hub.cas, "accessToken": "xet", "exp": 2**33}
            headers = {"X-Xet-Cas-Url": self.hub.cas, "X-Xet-Access-Token": "xet", "X-Xet-Token-Expiration": str(2**33)}
            self._json(token, 200, headers)
        else:
            self._error(404, "NotFound")

    @staticmethod
    def _revision(repo: Repo, tail: str) -> tuple[str, str]:
        """(revision, path inside): a revision may have slashes."""
        known = sorted((*repo.branches, *repo.commits), key=len, reverse=True)
        found = next((name for name in known if tail == name or tail.startswith(f"{name}/")), None)
        revision = tail.partition("/")[0] if found is None else found
        return revision, tail[len(revision) + 1 :]

    def _create(self, body: bytes) -> None:
        asked = json.loads(body)
        repo_id = f"{asked['organization']}/{asked['name']}"
        url = f"{self.hub.url}/{repo_id}"
        if repo_id in self.hub.repos:
            self._json({"error": "exists", "url": url}, 409)
            return
        private = asked.get("visibility") == "private" or bool(asked.get("private"))
        self.hub.repos[repo_id] = repo = Repo(private)
        repo.commit("main", "initial commit", {".gitattributes": Entry(b"*.safetensors filter=lfs\n", False)}, [])
        self._json({"url": url, "id": repo_id})

    def _branch(self, repo: Repo, name: str, body: bytes) -> None:
        if name in repo.branches:
            self._json({"error": "exists"}, 409)
            return
        repo.branches[name] = repo.branches["main"]
        self._json({})

    def _discussion(self, _: bytes, repo_id: str, number: str) -> None:
        self._json({
            "isPullRequest": True, "changes": {"base": "main"}, "filesWithConflicts": [], "num": int(number),
            "title": "t", "createdAt": "2026-01-01T00:00:00.000Z", "status": "draft",
            "repo": {"name": repo_id, "type": "model"}, "events": [], "author": {"name": "me"},
        })  # fmt: skip

    def _tree(self, files: Files, repo_id: str, revision: str) -> None:
        query = parse_qs(urlsplit(self.path).query)
        at = int(query.get("cursor", ["0"])[0])
        folders = {path.rsplit("/", i)[0] for path in files for i in range(1, path.count("/") + 1)}
        listed: list[dict[str, Any]] = [
            {"type": "directory", "path": folder, "oid": "0" * 40, "size": 0} for folder in sorted(folders)
        ]
        listed += [entry.listing(path) for path, entry in files.items()]
        headers = {}
        if at + PAGE < len(listed):
            url = f"{self.hub.url}/api/models/{repo_id}/tree/{quote(revision, safe='')}"
            headers["Link"] = f'<{url}?recursive=true&cursor={at + PAGE}>; rel="next"'
        self._json(listed[at : at + PAGE], 200, headers)

    def _preupload(self, files: Files, asked: dict[str, Any]) -> None:
        self._json({
            "files": [
                {
                    "path": file["path"],
                    "uploadMode": "lfs" if file["path"].endswith(LFS_SUFFIXES) else "regular",
                    "shouldIgnore": file["path"] in self.hub.ignored,
                    "oid": files[file["path"]].etag if file["path"] in files else None,
                }
                for file in asked["files"]
            ]
        })  # fmt: skip

    def _batch(self, body: bytes, repo_id: str) -> None:
        objects = []
        for asked in json.loads(body)["objects"]:
            oid, size = asked["oid"], asked["size"]
            entry: dict[str, Any] = {"oid": oid, "size": size}
            if oid not in self.hub.blobs:
                href = f"{self.hub.url}/lfs/{oid}"
                upload: dict[str, Any] = {"href": f"{href}?{self.hub.signature}"}
                if size > PART_BYTES:
                    count = -(-size // PART_BYTES)
                    parts = {f"{i:05d}": f"{href}/{i}?{self.hub.signature}" for i in range(1, count + 1)}
                    upload = {"href": f"{href}/complete", "header": {"chunk_size": str(PART_BYTES), **parts}}
                entry["actions"] = {"upload": upload, "verify": {"href": f"{href}/verify"}}
            objects.append(entry)
        self._json({"transfer": "multipart", "objects": objects})

    def _put(self, body: bytes, oid: str, part: str | None) -> None:
        with self.hub.lock:
            self.hub.received_bytes += len(body)
            if part is not None:
                self.hub.parts.setdefault(oid, {})[int(part)] = body
            elif hashlib.sha256(body).hexdigest() == oid:
                self.hub.blobs[oid] = body
            else:
                self._error(400, "BadDigest")
                return
        self._send(200, b"", {"ETag": f'"{hashlib.md5(body).hexdigest()}"'})

    def _complete(self, body: bytes, oid: str) -> None:
        parts = self.hub.parts.get(oid, {})
        data = b"".join(parts[part["partNumber"]] for part in json.loads(body)["parts"])
        if hashlib.sha256(data).hexdigest() != oid:
            self._error(400, "BadDigest")
            return
        self.hub.blobs[oid] = data
        self._json({})

    def _verify(self, body: bytes, oid: str) -> None:
        found = self.hub.blobs.get(oid)
        if found is None or len(found) != json.loads(body)["size"]:
            self._error(404, "NotFound")
        else:
            self._json({})

    def _commit(self, repo_id: str, repo: Repo, revision: str, body: bytes) -> None:
        files = dict(repo.commits[repo.branches[revision]])
        title, did = "", []
        for line in body.splitlines():
            item = json.loads(line)
            key, value = item["key"], item["value"]
            if key == "header":
                title = value["summary"]
                continue
            path = value["path"]
            did.append(f"{key} {path}")
            if key == "file":
                files[path] = Entry(base64.b64decode(value["content"]), False)
            elif key == "lfsFile":
                data, xet_hash = self.hub.blobs.get(value["oid"]), None
                if data is None and self.hub.cas is not None:
                    data, xet_hash = xet_file(self.hub.cas, value["oid"])
                if data is None:
                    self._error(400, f"object {value['oid']} was never uploaded")
                    return
                files[path] = Entry(data, True, xet_hash)
            elif key == "deletedFile":
                files.pop(path, None)
            else:
                raise AssertionError(key)
        oid = repo.commit(revision, title, files, did)
        self._json({"success": True, "commitOid": oid, "commitUrl": f"{self.hub.url}/{repo_id}/commit/{oid}"})

    def _resolve(self, repo_id: str, commit: str, files: Files, path: str) -> None:
        entry = files.get(path)
        if entry is None:
            self._error(404, "EntryNotFound")
            return
        headers = {"X-Repo-Commit": commit, "ETag": f'"{entry.etag}"', "Accept-Ranges": "bytes"}
        if entry.lfs:
            self.hub.blobs.setdefault(entry.sha256, entry.data)
            headers |= {
                "X-Linked-Size": str(entry.nbytes),
                "X-Linked-Etag": f'"{entry.sha256}"',
                "Location": f"{self.hub.cdn_url}/cdn/{entry.sha256}?path={quote(path)}&{self.hub.signature}",
            }
            if entry.xet_hash is not None:
                route = f"{self.hub.url}/api/models/{repo_id}/xet-read-token/{commit}"
                headers |= {"X-Xet-Hash": entry.xet_hash, "X-Xet-Refresh-Route": route}
            self._send(302, b"", headers)
            return
        self._ranged(path, entry.data, headers)

    def _cdn(self, _: bytes, oid: str) -> None:
        self._ranged(parse_qs(urlsplit(self.path).query)["path"][0], self.hub.blobs[oid], {"ETag": f'"{oid}"'})

    def _ranged(self, path: str, data: bytes, headers: dict[str, str]) -> None:
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or "")
        status = 200
        if asked is not None:
            begin, end = int(asked[1]), min(int(asked[2] or len(data)), len(data) - 1) + 1
            status, headers["Content-Range"] = 206, f"bytes {begin}-{end - 1}/{len(data)}"
            data = data[begin:end]
        if self.command == "HEAD":
            headers["Content-Length"] = str(len(data))
        else:
            with self.hub.lock:
                cut = len(data) if self._fault is None or self._fault.cut is None else self._fault.cut
                self.hub.sent[path] = self.hub.sent.get(path, 0) + min(cut, len(data))
        self._send(status, data, headers)


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, *_: Any) -> None:
        """A client that went away is no news."""


@contextmanager
def serving(hub: Hub) -> Iterator[Hub]:
    """Serve on a free port of 127.0.0.1."""
    server = _Server(("127.0.0.1", 0), type("Bound", (Handler,), {"hub": hub}))
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    hub.cdn_url = f"http://localhost:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
