"""Stand-ins for Google Cloud Storage and for S3 on this machine: the part of their protocols that
tensorstore and gcsfs speak, over a dict of objects. Tests point these to it, so that a bucket path
goes the whole way through the real clients."""

import contextlib
import http.server
import json
import re
import threading
import urllib.parse
import xml.sax.saxutils
from collections.abc import Iterator

NAME = "lab"


class Bucket:
  """The objects, name -> (generation, content), the names in the order they were written, and
  whether every request is refused."""

  def __init__(self):
    self.objects: dict[str, tuple[int, bytes]] = {}
    self.written: list[str] = []
    self.refuses = False
    self.lock = threading.Lock()

  def write(self, name: str, content: bytes) -> dict:
    """Stores an object and returns its description."""
    with self.lock:
      self.written.append(name)
      self.objects[name] = (len(self.written), content)
      return self.describe(name)

  def describe(self, name: str) -> dict:
    """What a client is told of an object."""
    generation, content = self.objects[name]
    return {
      "kind": "storage#object", "name": name, "bucket": NAME, "generation": str(generation),
      "metageneration": "1", "size": str(len(content)), "updated": "2026-01-01T00:00:00.000Z",
      "timeCreated": "2026-01-01T00:00:00.000Z"}

  def listed(self, query: dict[str, str]) -> dict:
    """The objects of a range or below a prefix; with a delimiter those of one level."""
    start, end = query.get("startOffset", ""), query.get("endOffset", "\U0010ffff")
    prefix, items, folders = query.get("prefix", ""), [], set()
    with self.lock:
      for name in sorted(self.objects):
        rest = name.removeprefix(prefix)
        if not (start <= name < end and name.startswith(prefix)):
          continue
        if query.get("delimiter") and "/" in rest:
          folders.add(prefix + rest.split("/")[0] + "/")
        else:
          items.append(self.describe(name))
    return {"items": items, "prefixes": sorted(folders)}


class Handler(http.server.BaseHTTPRequestHandler):
  """What both have in common."""

  protocol_version = "HTTP/1.1"
  disable_nagle_algorithm = True  # header and body are two packets
  bucket: Bucket

  def send(self, name: str, headers: dict[str, str]) -> None:
    """Sends an object, or the range of it that was asked for."""
    content, code = self.bucket.objects[name][1], 200
    if "Range" in self.headers:
      first, _, last = self.headers["Range"].removeprefix("bytes=").partition("-")
      code, size = 206, len(content)
      start = int(first) if first else size - int(last)
      content = content[start:int(last) + 1 if first and last else size]
      headers["Content-Range"] = f"bytes {start}-{start + len(content) - 1}/{size}"
    self.answer(code, content, headers)

  def answer(self, code: int, content: dict | bytes, headers: dict[str, str] | None = None):
    """Sends JSON or bytes."""
    body = content if isinstance(content, bytes) else json.dumps(content).encode()
    kind = "application/octet-stream" if isinstance(content, bytes) else "application/json"
    self.send_response(code)
    for key, value in {"Content-Type": kind, **(headers or {}),
                       "Content-Length": str(len(body))}.items():
      self.send_header(key, value)
    self.end_headers()
    if self.command != "HEAD":
      self.wfile.write(body)

  def log_message(self, *args):
    pass


class Google(Handler):
  """One request: /storage/v1/b/lab[/o[/NAME]], /upload/storage/v1/b/lab/o, or a batch of them."""

  def do_GET(self):
    path, query, name = self.parts()
    if self.bucket.refuses:
      self.refuse(403, "no access")
    elif path.rstrip("/").endswith(f"/b/{NAME}"):
      self.answer(200, {"kind": "storage#bucket", "name": NAME})
    elif not name:
      self.answer(200, self.bucket.listed(query))
    elif name not in self.bucket.objects:
      self.refuse(404, "no such object")
    elif query.get("alt") != "media":
      self.answer(200, self.bucket.describe(name))
    else:
      self.send(name, {"x-goog-generation": str(self.bucket.objects[name][0])})

  def do_POST(self):
    path, query, name = self.parts()
    body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
    if self.bucket.refuses:
      self.refuse(403, "no access")
    elif path.startswith("/batch"):
      self.batch(body)
    elif query.get("uploadType") == "multipart":
      described, content = (part.partition(b"\r\n\r\n" if b"\r\n\r\n" in part else b"\n\n")[2]
                            for part in self.sections(body))
      self.answer(200, self.bucket.write(json.loads(described)["name"], content))
    elif query.get("uploadType") == "resumable":  # the content follows, in one piece
      name = urllib.parse.quote(json.loads(body)["name"], safe="")
      self.answer(200, b"", {"Location": f"http://{self.headers['Host']}/upload/content/o/{name}"})
    else:
      self.answer(200, self.bucket.write(name or query["name"], body))

  def do_DELETE(self):
    _, _, name = self.parts()
    there = self.bucket.objects.pop(name, None) is not None
    self.answer(204, b"") if there else self.refuse(404, "no such object")

  def batch(self, body: bytes) -> None:
    """Answers a batch of deletions."""
    answers = []
    for part in self.sections(body):
      name = urllib.parse.unquote(re.search(rb"DELETE \S+/o/(\S+) ", part)[1].decode())
      there = self.bucket.objects.pop(name.partition("?")[0], None) is not None
      number = re.search(rb"(?i)content-id: <?([^>\r\n]+)", part)
      answers.append(
        "--batch\r\nContent-Type: application/http\r\nContent-ID: <response-"
        f"{number[1].decode() if number else 0}>\r\n\r\nHTTP/1.1 "
        + ("204 No Content" if there else "404 Not Found") + "\r\nContent-Length: 0\r\n\r\n\r\n")
    self.answer(200, ("".join(answers) + "--batch--").encode(),
                {"Content-Type": "multipart/mixed; boundary=batch"})

  def sections(self, body: bytes) -> list[bytes]:
    """The parts of a multipart body, without the line breaks around them."""
    edge = re.search(r'boundary="?([^";]+)', self.headers["Content-Type"])[1].encode()
    return [part.removeprefix(b"\r\n").removeprefix(b"\n").removesuffix(b"\n").removesuffix(b"\r")
            for part in body.split(b"--" + edge)[1:-1]]

  def parts(self) -> tuple[str, dict[str, str], str]:
    """Path, query, and the name of an object, "" where the path has none."""
    url = urllib.parse.urlsplit(self.path)
    query = dict(urllib.parse.parse_qsl(url.query, keep_blank_values=True))
    return url.path, query, urllib.parse.unquote(url.path.partition("/o/")[2])

  def refuse(self, code: int, reason: str):
    """Sends an error as the service does."""
    self.answer(code, {"error": {"code": code, "message": reason}})


class Amazon(Handler):
  """One request: /lab/NAME, or /lab?list-type=2."""

  def do_GET(self):
    name, query = self.parts()
    if self.bucket.refuses:
      self.refuse(403, "AccessDenied")
    elif "list-type" in query:
      found = self.bucket.listed({"startOffset": query.get("start-after", ""), **query})["items"]
      rows = "".join(
        f"<Contents><Key>{xml.sax.saxutils.escape(o['name'])}</Key><Size>{o['size']}</Size>"
        f"<ETag>\"{o['generation']}\"</ETag><LastModified>{o['updated']}</LastModified></Contents>"
        for o in found)
      self.answer(200, f"<ListBucketResult><IsTruncated>false</IsTruncated><KeyCount>{len(found)}"
                       f"</KeyCount>{rows}</ListBucketResult>".encode())
    elif name not in self.bucket.objects:
      self.refuse(404, "NoSuchKey")
    else:
      self.send(name, {"ETag": f'"{self.bucket.objects[name][0]}"'})

  do_HEAD = do_GET

  def do_PUT(self):
    name, _ = self.parts()
    body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
    if self.bucket.refuses:
      self.refuse(403, "AccessDenied")
    else:
      self.answer(200, b"", {"ETag": f'"{self.bucket.write(name, body)["generation"]}"'})

  def do_DELETE(self):
    self.bucket.objects.pop(self.parts()[0], None)
    self.answer(204, b"")

  def parts(self) -> tuple[str, dict[str, str]]:
    """Name of the object, and query."""
    url = urllib.parse.urlsplit(self.path)
    name = urllib.parse.unquote(url.path).removeprefix(f"/{NAME}").removeprefix("/")
    return name, dict(urllib.parse.parse_qsl(url.query, keep_blank_values=True))

  def refuse(self, code: int, reason: str):
    """Sends an error as the service does."""
    self.answer(code, f"<Error><Code>{reason}</Code><Message>no access</Message></Error>".encode())


@contextlib.contextmanager
def serving(kind: type[Handler]) -> Iterator[tuple[Bucket, str]]:
  """(the bucket, the address of its server) of Google or Amazon."""
  bucket = Bucket()
  own = type("Own", (kind,), {"bucket": bucket})
  many = {"request_queue_size": 64}  # clients open a connection for each of many requests
  server = type("Server", (http.server.ThreadingHTTPServer,), many)(("127.0.0.1", 0), own)
  threading.Thread(target=server.serve_forever, daemon=True).start()
  try:
    yield bucket, f"http://127.0.0.1:{server.server_port}"
  finally:
    server.shutdown()
    server.server_close()
