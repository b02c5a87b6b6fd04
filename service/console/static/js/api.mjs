// The server, as the pages see it. A key is kept for this tab only, and leaves it only towards this server.

const KEY = "openworld.key";

export const session = {
  me: null, // { keys_needed, name, roles } once the server has said so
  get key() {
    return sessionStorage.getItem(KEY);
  },
  set key(secret) {
    secret ? sessionStorage.setItem(KEY, secret) : sessionStorage.removeItem(KEY);
  },
  may(role) {
    return !role || Boolean(this.me?.roles.includes(role));
  },
};

/** What went wrong, in the server's own words (RFC 9457). */
export class Problem extends Error {
  constructor({ status = 0, code = "unreachable", title, detail, request_id: requestId = null, errors = [] }) {
    super(detail);
    Object.assign(this, { status, code, title, detail, requestId, errors });
  }
}

const heard = new Set();

/** Call me when the server asks for a key. */
export const onUnauthorized = (listener) => heard.add(listener);

async function request(path, { method = "GET", json, body, headers = {}, signal } = {}) {
  const sent = { ...headers };
  if (session.key) sent.Authorization = `Bearer ${session.key}`;
  if (json !== undefined) {
    sent["Content-Type"] = "application/json";
    body = JSON.stringify(json);
  }
  let response;
  try {
    response = await fetch(path, { method, headers: sent, body, signal, cache: "no-store" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Problem({
      title: "The server cannot be reached",
      detail: "Is it running? This page tries again when you ask it to.",
    });
  }
  if (response.ok) return response;
  const problem = new Problem(await described(response));
  if (problem.status === 401) for (const listener of heard) listener();
  throw problem;
}

async function described(response) {
  try {
    return await response.json();
  } catch {
    return { status: response.status, title: `The server answered ${response.status}`, detail: response.statusText };
  }
}

export const ask = async (path, options) => (await request(path, options)).json();
export const post = (path, json, options) => ask(path, { method: "POST", json, ...options });
export const patch = (path, json, options) => ask(path, { method: "PATCH", json, ...options });

/** The path with the query, without what is null. */
export function query(path, values) {
  const given = Object.entries(values).filter(([, value]) => value !== null && value !== undefined);
  return given.length ? `${path}?${new URLSearchParams(given)}` : path;
}

/** An image's bytes to a route that takes them as they are. */
export const send = (path, blob, options) =>
  ask(path, {
    method: "POST",
    body: blob,
    headers: { "Content-Type": blob.type || "application/octet-stream" },
    ...options,
  });

/** A picture as an address for an <img>, fetched with the key; whoever asked revokes it. */
export async function pictureUrl(path, signal) {
  const headers = session.key ? { Authorization: `Bearer ${session.key}` } : {};
  const response = await fetch(path, { headers, signal }); // unlike the rest, the browser may keep it
  if (!response.ok) throw new Problem(await described(response));
  return URL.createObjectURL(await response.blob());
}

/** Server-sent events through fetch, because EventSource cannot carry a key. Yields each event's data. */
export async function* events(path, signal) {
  const response = await request(path, { signal });
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    text += value;
    const parts = text.split("\n\n");
    text = parts.pop();
    for (const part of parts) {
      const data = part
        .split("\n")
        .filter((line) => line.startsWith("data: "))
        .map((line) => line.slice(6))
        .join("\n");
      if (data) yield JSON.parse(data);
    }
  }
}
