// HTTP requests to the server. The key is stored for this browser tab only and is sent only to this server.

const KEY = "openworld.key";

export const session = {
  me: null, // { keys_needed, name, roles, keep } of GET /me
  get key() {
    return sessionStorage.getItem(KEY);
  },
  set key(secret) {
    secret ? sessionStorage.setItem(KEY, secret) : sessionStorage.removeItem(KEY);
  },
  hasRole(role) {
    return !role || Boolean(this.me?.roles.includes(role));
  },
};

/** An error response as problem details (RFC 9457), or a server that cannot be reached. */
export class Problem extends Error {
  constructor({ status = 0, code = "unreachable", title, detail, request_id: requestId = null, errors = [] }) {
    super(detail);
    Object.assign(this, { status, code, title, detail, requestId, errors });
  }
}

let unauthorized = () => {};

/** Sets the function to call after every response with status 401. */
export function onUnauthorized(listener) {
  unauthorized = listener;
}

async function request(path, { method = "GET", json, body, headers = {}, signal, cache = "no-store" } = {}) {
  const sent = { ...headers };
  if (session.key) sent.Authorization = `Bearer ${session.key}`;
  if (json !== undefined) {
    sent["Content-Type"] = "application/json";
    body = JSON.stringify(json);
  }
  let response;
  try {
    response = await fetch(path, { method, headers: sent, body, signal, cache });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Problem({
      title: "The server cannot be reached",
      detail: "Check that the server is running and that you are connected, then try again.",
    });
  }
  if (response.ok) return response;
  const problem = new Problem(await problemDetails(response));
  if (problem.status === 401) unauthorized();
  throw problem;
}

async function problemDetails(response) {
  try {
    return await response.json();
  } catch {
    return { status: response.status, title: `The server answered ${response.status}`, detail: response.statusText };
  }
}

export const get = async (path, options) => (await request(path, options)).json();
export const post = (path, json, options) => get(path, { method: "POST", json, ...options });
export const put = (path, json, options) => get(path, { method: "PUT", json, ...options });
export const patch = (path, json, options) => get(path, { method: "PATCH", json, ...options });

/** Adds query parameters to a path, without those that are null. */
export function withQuery(path, parameters) {
  const given = Object.entries(parameters).filter(([, value]) => value != null);
  return given.length ? `${path}?${new URLSearchParams(given)}` : path;
}

/** Posts an image as the body of the request. */
export const postImage = (path, blob) =>
  get(path, { method: "POST", body: blob, headers: { "Content-Type": blob.type || "application/octet-stream" } });

/** Fetches an image with the key and returns an object URL, which the caller must revoke. */
export async function fetchImageUrl(path) {
  const response = await request(path, { cache: "default" });
  return URL.createObjectURL(await response.blob());
}

/** Yields the data of server-sent events. Uses fetch because EventSource cannot send a key. */
export async function* streamEvents(path, signal) {
  const response = await request(path, { signal });
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let buffer = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    buffer += value;
    const events = buffer.split("\n\n");
    buffer = events.pop();
    for (const event of events) {
      const data = event
        .split("\n")
        .filter((line) => line.startsWith("data: "))
        .map((line) => line.slice(6))
        .join("\n");
      if (data) yield JSON.parse(data);
    }
  }
}
