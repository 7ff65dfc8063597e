// The images that go with the next prompt: chosen, pasted or dropped, and removed again before it is sent.

import { byId, make, say } from "./draw.js";

const TYPES = ["image/png", "image/jpeg", "image/webp", "image/gif"];
const MAX_COUNT = Number(document.documentElement.dataset.images);
const MAX_BYTES = Number(document.documentElement.dataset.imageBytes);
const megabytes = (bytes) => `${(bytes / 2 ** 20).toFixed(1)} MB`;

export class Images {
  /** `canSee()`: the model that is chosen takes images. */
  constructor(canSee) {
    this._canSee = canSee;
    this._waiting = []; // {name, file, url}
    this._sent = []; // those of the chat's earlier turns, which are sent again with each prompt
    byId("add-image").addEventListener("click", () => byId("image-files").click());
    byId("image-files").addEventListener("change", ({ target }) => {
      this._add([...target.files]);
      target.value = ""; // the same file may be chosen again
    });
    byId("prompt").addEventListener("paste", (event) => {
      const { files, types } = event.clipboardData;
      if (files.length === 0 || types.includes("text/plain")) return;
      event.preventDefault();
      this._add([...files]);
    });
    for (const kind of ["dragover", "drop"]) {
      byId("ask").addEventListener(kind, (event) => {
        if (!event.dataTransfer.types.includes("Files")) return;
        event.preventDefault(); // the browser would leave the page and open the file
        if (kind === "drop") this._add([...event.dataTransfer.files]);
      });
    }
  }

  /** Offer what the chosen model can do. */
  show() {
    byId("add-image").hidden = !this._canSee();
    this._draw(this._waiting.length && !this._canSee() ? "This model sees no images: remove them, or choose another model." : "");
  }

  /** Hand over the images of a prompt that is sent. */
  take() {
    const taken = this._waiting;
    this._sent.push(...taken);
    this._waiting = [];
    this._draw("");
    return taken;
  }

  /** Take back the images of a prompt that was not answered. */
  putBack(images) {
    this._sent = this._sent.filter((image) => !images.includes(image));
    this._waiting.unshift(...images);
    this._draw("");
  }

  /** A new chat begins; what waits stays. */
  forget() {
    for (const { url } of this._sent) URL.revokeObjectURL(url);
    this._sent = [];
  }

  _add(files) {
    const refused = files.map((file) => this._why(file) ?? this._append(file)).filter(Boolean);
    const { length } = this._waiting;
    this._draw(refused.join(" ") || `${length} image${length === 1 ? "" : "s"} to send.`, refused.length > 0);
  }

  _append(file) {
    const name = file.name || "image";
    const same = this._waiting.filter((image) => image.file.name === file.name).length;
    this._waiting.push({ name: same ? `${name} (${same + 1})` : name, file, url: URL.createObjectURL(file) });
  }

  /** Why a file cannot be sent, or null. */
  _why(file) {
    const held = [...this._sent, ...this._waiting];
    const bytes = held.reduce((sum, image) => sum + image.file.size, 0);
    if (!this._canSee()) return "This model sees no images.";
    if (!TYPES.includes(file.type)) return `${file.name} is no PNG, JPEG, WebP or GIF.`;
    if (held.length >= MAX_COUNT) return `${file.name} is one too many: a chat may have ${MAX_COUNT} images.`;
    if (bytes + file.size > MAX_BYTES) return `${file.name} is too large: it has ${megabytes(file.size)}, and the images of a chat may have ${megabytes(MAX_BYTES)} together.`;
    return null;
  }

  _remove(image) {
    const place = this._waiting.indexOf(image);
    this._waiting.splice(place, 1);
    URL.revokeObjectURL(image.url);
    this._draw(`${image.name} is removed.`);
    (byId("images").querySelectorAll("button")[Math.min(place, this._waiting.length - 1)] ?? byId("add-image")).focus();
  }

  _draw(words, isWrong = false) {
    byId("images").replaceChildren(...this._waiting.map((image) => {
      const button = make("button", "quiet", "Remove");
      button.type = "button";
      button.setAttribute("aria-label", `Remove ${image.name}`);
      button.addEventListener("click", () => this._remove(image));
      return make("li", "", drawn(image), button);
    }));
    say(byId("images-said"), words);
    byId("images-said").dataset.state = isWrong ? "broken" : "idle";
  }
}

/** An image as the chat shows it. */
export function drawn({ name, url }) {
  const image = make("img");
  image.src = url;
  image.alt = name;
  return image;
}

/** What a message says, with images before the text. Throws where a file cannot be read any more. */
export async function contentOf(text, images) {
  if (images.length === 0) return text;
  const parts = await Promise.all(images.map(async ({ file }) => ({ type: "image_url", image_url: { url: await readUrl(file) } })));
  return [...parts, { type: "text", text }];
}

function readUrl(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.addEventListener("load", () => resolve(reader.result));
    reader.addEventListener("error", () => reject(new Error(`${file.name} cannot be read: ${reader.error.message}`)));
    reader.readAsDataURL(file);
  });
}
