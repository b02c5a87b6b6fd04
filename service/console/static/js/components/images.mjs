// Images of the inbox and of the image store. Without keys the browser loads them lazily by itself. An <img> cannot send a key: with keys, an
// image is fetched when it comes near the viewport and released when it leaves.

import { fetchImageUrl, session } from "../api.mjs";
import { h } from "../dom.mjs";

const paths = new WeakMap(); // img element -> path to fetch

const observer = new IntersectionObserver(
  (entries) => {
    for (const { target, isIntersecting } of entries) isIntersecting ? load(target) : release(target);
  },
  { rootMargin: "300px" },
);

async function load(image) {
  if (image.dataset.state) return;
  image.dataset.state = "loading";
  try {
    const url = await fetchImageUrl(paths.get(image));
    if (image.dataset.state !== "loading") return URL.revokeObjectURL(url); // released during the request
    image.dataset.state = "loaded";
    image.src = url;
  } catch {
    delete image.dataset.state;
    image.classList.add("missing");
  }
}

function release(image) {
  if (image.dataset.state === "loaded") URL.revokeObjectURL(image.src);
  image.removeAttribute("src");
  delete image.dataset.state;
}

function serverImage(path, attributes) {
  const image = h("img", { decoding: "async", onerror: () => image.classList.add("missing"), ...attributes });
  if (session.me.keys_needed) {
    paths.set(image, path);
    observer.observe(image);
  } else {
    image.loading = "lazy";
    image.src = path;
  }
  return image;
}

/** A decorative thumbnail: its meaning belongs to the element around it. */
export const thumbnail = (id, size = 256) =>
  serverImage(`novelties/${id}/thumbnail?size=${size}`, { class: "thumbnail", alt: "" });

/** The same, of an image that a task submitted. */
export const storedThumbnail = (id, size) =>
  serverImage(`images/${id}/thumbnail?size=${size}`, { class: "thumbnail", alt: "" });

export const fullImage = (id, alt) => serverImage(`novelties/${id}/image`, { class: "full-image", alt });
