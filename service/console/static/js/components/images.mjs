// Pictures of the inbox. Without keys the browser fetches and forgets them by itself; an <img> cannot send a key, so
// with keys they are fetched when they come near the screen, and let go of when they leave it.

import { pictureUrl, session } from "../api.mjs";
import { h } from "../dom.mjs";

const paths = new WeakMap(); // img -> where its bytes are

const watcher = new IntersectionObserver(
  (entries) => {
    for (const { target, isIntersecting } of entries) isIntersecting ? fetchInto(target) : letGo(target);
  },
  { rootMargin: "300px" },
);

async function fetchInto(image) {
  if (image.dataset.state) return;
  image.dataset.state = "coming";
  try {
    const url = await pictureUrl(paths.get(image));
    if (image.dataset.state !== "coming") return URL.revokeObjectURL(url); // it has left the screen meanwhile
    image.dataset.state = "there";
    image.src = url;
  } catch {
    delete image.dataset.state;
    image.classList.add("gone");
  }
}

function letGo(image) {
  if (image.dataset.state === "there") URL.revokeObjectURL(image.src);
  image.removeAttribute("src");
  delete image.dataset.state;
}

function picture(path, alt, attributes) {
  const image = h("img", { alt, decoding: "async", onerror: () => image.classList.add("gone"), ...attributes });
  if (session.me.keys_needed) {
    paths.set(image, path);
    watcher.observe(image);
  } else {
    image.loading = "lazy";
    image.src = path;
  }
  return image;
}

export const thumbnail = (id, alt = "", size = 256) =>
  picture(`novelties/${id}/thumbnail?size=${size}`, alt, { class: "thumb" });

export const wholePicture = (id, alt) => picture(`novelties/${id}/image`, alt, { class: "whole" });
