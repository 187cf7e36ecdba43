"use strict";
// The page of `sd-ort serve`: one form, and the images of its requests side by side.

const form = document.getElementById("form");
const statusLine = document.getElementById("status");
const images = document.getElementById("images");
const button = document.getElementById("generate");
const cancel = document.getElementById("cancel");
const field = (name) => form.elements.namedItem(name);
let loras = [];
let variants = [];
let running = null;

function show(text, isError = false) {
  statusLine.textContent = text;
  statusLine.classList.toggle("error", isError);
}

async function call(path, options = {}) {
  const headers = { ...options.headers };
  if (field("token").value) headers.Authorization = `Bearer ${field("token").value}`;
  const response = await fetch(path, { ...options, headers });
  if (response.status === 401) {
    document.getElementById("token").hidden = false;
    field("token").focus();
  }
  const content = await response.json();
  if (!response.ok) throw new Error(content.error.message);
  return content;
}

async function loadModel() {
  const model = await call("v1/model");
  document.getElementById("model").textContent = model.title;
  for (const [name, value] of Object.entries({
    width: model.default_size, height: model.default_size, steps: model.steps, guidance: model.guidance,
  })) {
    field(name).value = value;
  }
  for (const name of ["width", "height"]) {
    field(name).step = model.size_multiple;
    field(name).min = model.size_multiple;
  }
  const group = document.getElementById("loras");
  group.hidden = model.loras.length === 0;
  loras = model.loras.map(({ name, scale }) => {
    const label = document.createElement("label");
    const input = document.createElement("input");
    Object.assign(input, { type: "number", step: "0.05", value: scale });
    label.append(`${name} `, input);
    group.append(label);
    return { name, input };
  });
  const choices = document.getElementById("variants");
  choices.hidden = model.variants.length === 0;
  variants = model.variants.map((name) => {
    const label = document.createElement("label");
    const input = document.createElement("input");
    Object.assign(input, { type: "checkbox", checked: true });
    label.append(input, name);
    choices.append(label);
    return { name, input };
  });
}

function requestBody() {
  const body = { n: Number(field("n").value), size: `${field("width").value}x${field("height").value}` };
  for (const name of ["prompt", "negative_prompt"]) body[name] = field(name).value;
  for (const name of ["steps", "guidance"]) body[name] = Number(field(name).value);
  if (field("seed").value !== "") body.seed = Number(field("seed").value);
  if (loras.length) body.loras = Object.fromEntries(loras.map(({ name, input }) => [name, Number(input.value)]));
  return body;
}

function smallButton(text, action) {
  const element = document.createElement("button");
  Object.assign(element, { type: "button", textContent: text, onclick: action });
  return element;
}

// Adds an image behind the one `before`, or first of all. Returns its item.
function add(body, { b64_json: data, seed }, seconds, before) {
  const item = document.createElement("li");
  const figure = document.createElement("figure");
  const image = document.createElement("img");
  const caption = document.createElement("figcaption");
  image.src = `data:image/png;base64,${data}`;
  image.alt = body.prompt;
  const scales = Object.entries(body.loras ?? {}).map(([name, scale]) => `, ${name} ${scale}`).join("");
  const settings = `${body.size}, ${body.steps} steps, guidance ${body.guidance}, seed ${seed}${scales}`;
  const variant = variants.length ? `${body.variant ?? "this server"}: ` : "";
  caption.append(`${variant}${seconds.toFixed(2)} s, ${body.prompt} (${settings}) `);
  caption.append(smallButton("Keep seed", () => { field("seed").value = seed; field("prompt").focus(); }), " ");
  caption.append(smallButton("Remove", () => { item.remove(); field("prompt").focus(); }));
  figure.append(image, caption);
  item.append(figure);
  if (before) before.after(item);
  else images.prepend(item);
  return item;
}

form.addEventListener("submit", async (event) => {
  event.preventDefault();
  if (running) return;
  running = new AbortController();
  const body = requestBody();
  const others = variants.filter(({ input }) => input.checked).map(({ name }) => name);
  let started = performance.now();
  const elapsed = () => (performance.now() - started) / 1000;
  const clock = setInterval(() => show(`Generating: ${elapsed().toFixed(0)} s`), 1000);
  show("Generating");
  button.setAttribute("aria-disabled", "true");
  cancel.hidden = false;
  try {
    const times = [];
    let item = null;
    for (const variant of ["", ...others]) { // one after the other: side by side they would share the machine
      if (variant) body.variant = variant;
      started = performance.now();
      const answer = await call("v1/images/generations", {
        method: "POST", body: JSON.stringify(body), signal: running.signal,
        headers: { "Content-Type": "application/json" },
      });
      const seconds = elapsed();
      body.seed = answer.data[0].seed;
      for (const image of answer.data) item = add({ ...body }, image, seconds, item);
      const count = answer.data.length === 1 ? "1 image" : `${answer.data.length} images`;
      times.push(`${variant ? `${variant}: ` : ""}${count} in ${seconds.toFixed(2)} s`);
    }
    show(times.join("; "));
  } catch (error) {
    show(error.name === "AbortError" ? "Canceled" : error.message, error.name !== "AbortError");
  } finally {
    clearInterval(clock);
    button.removeAttribute("aria-disabled");
    cancel.hidden = true;
    running = null;
  }
});

cancel.addEventListener("click", () => running?.abort());
field("prompt").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) form.requestSubmit();
});
field("token").addEventListener("change", () => loadModel().then(() => show("")).catch((error) => show(error.message, true)));
loadModel().catch((error) => show(error.message, true));
