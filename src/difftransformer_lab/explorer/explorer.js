"use strict";

const $ = (root, selector) => root.querySelector(selector);
const all = (root, selector) => [...root.querySelectorAll(selector)];
const triangle = rows => rows * (rows + 1) / 2;
const minus = text => String(text).replace("-", "\u2212");
const fixed = (value, digits = 3) => minus((Math.abs(value) < 0.5 * 10 ** -digits ? 0 : value).toFixed(digits));
const THUMB = 48;

// ---- The models, as page.py packs them ----

// Base85 as Python writes it, with a comma for "<": five characters for four bytes, and fewer for the last ones.
function bytesOf(text) {
  const digits = new Uint8Array(128), words = new DataView(new ArrayBuffer(4 * Math.ceil(text.length / 5)));
  const letters = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz!#$%&()*+-;,=>?@^_`{|}~";
  for (let i = 0; i < 85; i++) digits[letters.charCodeAt(i)] = i;
  for (let i = 0; i < text.length; i += 5) {
    let word = 0;
    for (let j = i; j < i + 5; j++) word = 85 * word + (j < text.length ? digits[text.charCodeAt(j)] : 84);
    words.setUint32(4 * i / 5, word);
  }
  return words.buffer.slice(0, Math.floor(4 * text.length / 5));
}

async function unpack(script) {
  const stream = new Blob([bytesOf(script.textContent)]).stream().pipeThrough(new DecompressionStream("deflate-raw"));
  const bytes = new Uint8Array(await new Response(stream).arrayBuffer());
  const start = 4 + new DataView(bytes.buffer).getUint32(0, true), count = (bytes.length - start) / 2;
  const model = JSON.parse(new TextDecoder().decode(bytes.subarray(4, start)));
  const counts = new Uint16Array(count);
  for (let i = 0; i < count; i++) counts[i] = bytes[start + i] | bytes[start + count + i] << 8;
  model.size = model.tokens.length;
  model.heads = model.layers.flatMap((layer, index) =>
    Array.from({length: layer.heads}, (_, head) => ({layer: index, head, lambda: layer.lambda && layer.lambda[head]})));
  const maps = model.layers.reduce((sum, layer) => sum + layer.heads * layer.maps, 0);
  let place = 0;
  for (const head of model.heads) {
    const second = model.layers[head.layer].maps === 2;
    const [first, other] = [place, place + 1];
    place += second ? 2 : 1;
    const read = map => (row, key) => counts[maps * triangle(row) + map * (row + 1) + key] / levels(row);
    const levels = row => model.levels ?? Math.ceil(503 * (1 + Math.abs(second ? head.own(row) : 0)));
    head.first = read(first);
    head.second = second ? read(other) : null;
    head.own = row => head.lambda[head.lambda.length > 1 ? row : 0];
    head.mean = second ? head.lambda.reduce((sum, value) => sum + value, 0) / head.lambda.length : 0;
    head.byToken = second && head.lambda.length > 1;
  }
  return model;
}

// The weights that a head gives in a row; with `lambda` null the model's own lambda.
function left(head, row, key, lambda = null) {
  if (!head.second) return head.first(row, key);
  return head.first(row, key) - (lambda ?? head.own(row)) * head.second(row, key);
}

function measures(head, size, lambda = null) {
  let kept = 0, formed = 0, entropy = 0, first = 0;
  for (let row = 0; row < size; row++) {
    let sum = 0, logs = 0;
    const lam = head.second ? lambda ?? head.own(row) : 0;
    for (let key = 0; key <= row; key++) {
      const a = head.first(row, key), b = head.second ? head.second(row, key) : 0, weight = Math.abs(a - lam * b);
      formed += a + Math.abs(lam) * b;
      sum += weight;
      if (weight > 0) logs += weight * Math.log(weight);
    }
    kept += sum;
    if (row && sum) entropy += (Math.log(sum) - logs / sum) / Math.log(row + 1);
    if (row) first += left(head, row, 0, lambda);
  }
  const rows = Math.max(1, size - 1);
  return {cancelled: formed ? 1 - kept / formed : 0, entropy: entropy / rows, first: first / rows};
}

// ---- Colours: the stops are those of the legend, which follow the theme ----

let colours = null;

function readColours() {
  const stops = all(document, ".stop").map(stop => getComputedStyle(stop).backgroundColor.match(/[\d.]+/g).map(Number));
  colours = new Uint32Array(2049);
  for (let i = 0; i < 2049; i++) {
    const signed = Math.cbrt((i - 1024) / 1024), at = (signed + 1) * 2, low = Math.min(3, Math.floor(at));
    const [r, g, b] = [0, 1, 2].map(c => Math.round(stops[low][c] + (at - low) * (stops[low + 1][c] - stops[low][c])));
    colours[i] = (255 << 24 | b << 16 | g << 8 | r) >>> 0;
  }
}

const colour = weight => colours[Math.round(1024 * (1 + Math.max(-1, Math.min(1, weight))))];

function paint(canvas, size, pixels) {
  const picture = new ImageData(size, size);
  pixels(new Uint32Array(picture.data.buffer));
  canvas.width = canvas.height = size;
  canvas.getContext("2d").putImageData(picture, 0, 0);
}

function paintMap(canvas, size, weight) {
  paint(canvas, size, pixels => {
    for (let row = 0; row < size; row++)
      for (let key = 0; key <= row; key++) pixels[row * size + key] = colour(weight(row, key));
  });
}

// Each pixel of a thumbnail shows the largest of its weights, so that no line is lost.
function paintThumb(canvas, size, head) {
  const side = Math.min(size, THUMB), most = new Float32Array(side * side).fill(NaN);
  for (let row = 0; row < size; row++) {
    const line = Math.floor(row * side / size) * side;
    for (let key = 0; key <= row; key++) {
      const place = line + Math.floor(key * side / size), weight = left(head, row, key);
      if (!(Math.abs(weight) <= Math.abs(most[place]))) most[place] = weight;
    }
  }
  paint(canvas, side, pixels => most.forEach((weight, i) => { if (!Number.isNaN(weight)) pixels[i] = colour(weight); }));
}

// ---- Lists that the arrow keys walk through ----

function listbox(list, options, chosen, choose) {
  const step = {ArrowLeft: -1, ArrowRight: 1, PageUp: -10, PageDown: 10, Home: -Infinity, End: Infinity};
  list.addEventListener("keydown", event => {
    const items = options(), at = chosen();
    let to = at + step[event.key];
    if (event.key === "ArrowUp" || event.key === "ArrowDown") to = beside(items, at, event.key === "ArrowUp" ? -1 : 1);
    if (Number.isNaN(to) || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    choose(Math.max(0, Math.min(items.length - 1, to)), event.shiftKey);
  });
}

// The option nearest above or below.
function beside(items, at, direction) {
  const middle = item => item.offsetLeft + item.offsetWidth / 2, here = items[at];
  let best = at, distance = Infinity, line = null;
  for (let i = at + direction; i >= 0 && i < items.length; i += direction) {
    const top = items[i].offsetTop;
    if (top === here.offsetTop) continue;
    line ??= top;
    if (top !== line) break;
    const off = Math.abs(middle(items[i]) - middle(here));
    if (off < distance) [best, distance] = [i, off];
  }
  return best;
}

function select(list, items, chosen) {
  items.forEach((item, i) => item.setAttribute("aria-selected", i === chosen));
  list.setAttribute("aria-activedescendant", items[chosen].id);
}

// ---- One model ----

const views = [];
let marking = false, together = false, speech = 0;

function say(text) {
  clearTimeout(speech);
  speech = setTimeout(() => { $(document, "#said").textContent = text; }, 200);
}

function shownToken(text) {
  if (/^ +$/.test(text)) return "\u2423".repeat(Math.min(4, text.length));
  return text.replace(/\n/g, "\u21b5").replace(/\r/g, "\u240d").replace(/\t/g, "\u21e5");
}

const quoted = text => `\u201c${shownToken(text).trim()}\u201d`;

class View {
  constructor(model, index) {
    Object.assign(this, {model, index, lambda: null, row: model.size - 1, preview: null, mark: null, order: model.heads});
    this.root = $(document, "#model").content.firstElementChild.cloneNode(true);
    this.differential = model.heads.some(head => head.second);
    this.root.classList.toggle("one", !this.differential);
    // Where each token ends in the text, by which tokens of two tokenizers are matched.
    let end = 0;
    this.ends = model.tokens.map((text, i) => (end += i || !model.begins ? text.length : 0));
    this.label();
    this.makeTokens();
    this.makeHeads();
    this.listen();
    this.head = model.heads[0];
  }

  label() {
    const {model, root} = this, counts = [...new Set(model.layers.map(layer => layer.heads))];
    root.setAttribute("aria-label", model.name);
    $(root, "h2").textContent = model.name;
    const cut = model.whole > model.size ? ` The text has ${model.whole} tokens; only the first ${model.size} are shown.` : "";
    $(root, ".name p").textContent =
      `${model.kind}: ${model.layers.length} layers of ${counts.join(" or ")} heads, ${model.size} tokens.${cut}`;
    $(root, "[data-kind=left] figcaption").innerHTML = this.differential
      ? "<b>A1 \u2212 \u03bbA2</b> what is left" : "<b>A</b> where the head looks";
    $(root, ".key").innerHTML = this.differential
      ? '<i class="ghost"></i>A1 alone<i class="adds"></i>left after the subtraction<i class="takes"></i>below zero. Heights follow the square root of the weight.'
      : '<i class="adds"></i>Heights follow the square root of the weight.';
    root.style.setProperty("--columns", Math.max(...counts));
    const lambdas = model.heads.filter(head => head.second).flatMap(head => head.lambda);
    Object.assign($(root, "input"), {
      min: Math.min(0, Math.floor(10 * Math.min(...lambdas, 0)) / 10), max: Math.max(1, Math.ceil(10 * Math.max(...lambdas, 1)) / 10),
    });
  }

  makeTokens() {
    const list = $(this.root, ".text");
    this.tokens = this.model.tokens.map((text, i) => {
      const token = document.createElement("span");
      token.className = i || !this.model.begins ? "token" : "token special";
      token.id = `token-${this.index}-${i}`;
      token.setAttribute("role", "option");
      token.innerHTML = '<i class="a up"></i><i class="d up"></i><i class="d down"></i><b></b>';
      $(token, "b").textContent = shownToken(text);
      if (!text.trim()) token.setAttribute("aria-label", text.includes("\n") ? "line end" : "space");
      list.append(token);
      if (text.endsWith("\n")) list.append(document.createElement("br"));
      return token;
    });
  }

  makeHeads() {
    this.options = new Map(this.model.heads.map(head => {
      const option = document.createElement("div");
      option.className = "head";
      option.id = `head-${this.index}-${head.layer}-${head.head}`;
      option.setAttribute("role", "option");
      option.innerHTML = '<canvas aria-hidden="true"></canvas><span></span><span></span>';
      option.firstElementChild.nextSibling.textContent = `${head.layer}.${head.head}`;
      option.addEventListener("click", () => this.choose(head));
      return [head, option];
    }));
  }

  // The token that the text asks for: the first of the marked span, or the last one that is what this model predicts.
  asked() {
    const {model} = this, last = model.size - 1;
    if (model.mark) return model.mark[0];
    const said = model.next[last][0][0];
    return model.tokens.lastIndexOf(said, last - 1);
  }

  // The head that gives a token most of what the last token reads, among heads of a layer, or of all.
  reader(token, layer = null) {
    const last = this.model.size - 1, own = this.model.heads.filter(head => head.layer === layer);
    const heads = own.length ? own : this.model.heads;
    return heads.reduce((best, head) => left(head, last, token) > left(best, last, token) ? head : best);
  }

  // The page opens with a head that reads what the text asks for; without such a token, with the head whose last token reads
  // a far token most. Heads that subtract come first.
  opening(token) {
    if (token > 0) return this.reader(token);
    const last = this.model.size - 1, subtracts = this.model.heads.filter(head => head.mean > 0);
    const found = head => Math.max(0, ...Array.from({length: Math.max(0, last - 4)}, (_, i) => left(head, last, i + 1)));
    return (subtracts.length ? subtracts : this.model.heads).reduce((best, head) => found(head) > found(best) ? head : best);
  }

  listen() {
    const {root} = this, text = $(root, ".text"), grid = $(root, ".grid"), slider = $(root, "input");
    const index = event => this.tokens.indexOf(event.target.closest(".token"));
    text.addEventListener("pointerover", event => { if (index(event) >= 0) this.show(index(event)); });
    text.addEventListener("pointerleave", () => this.show(null));
    text.addEventListener("pointerdown", event => {
      if (index(event) < 0) return;
      if (marking) this.setMark([this.mark ? this.mark[0] : index(event), index(event)]);
      else this.chooseRow(index(event), event.shiftKey);
    });
    listbox(text, () => this.tokens, () => this.row, (to, extend) => this.chooseRow(to, extend));
    text.addEventListener("keydown", event => { if (event.key === "Escape") this.setMark(null); });
    listbox(grid, () => this.order.map(head => this.options.get(head)), () => this.order.indexOf(this.head),
      to => this.choose(this.order[to]));
    $(root, ".previous").addEventListener("click", () => this.step(-1));
    $(root, ".next").addEventListener("click", () => this.step(1));
    $(root, ".png").addEventListener("click", () => this.savePicture());
    $(root, ".csv").addEventListener("click", () => this.saveTable());
    slider.addEventListener("input", () => this.setLambda(Number(slider.value)));
    slider.addEventListener("keydown", event => { if (event.key === "0") this.setLambda(null); });
    $(root, ".reset").addEventListener("click", () => this.setLambda(null));
    for (const square of all(root, ".square")) {
      const at = event => {
        const box = square.getBoundingClientRect(), size = this.model.size;
        const [key, row] = [(event.clientX - box.left) / box.width, (event.clientY - box.top) / box.height]
          .map(share => Math.max(0, Math.min(size - 1, Math.floor(share * size))));
        return {row, key};
      };
      square.addEventListener("pointermove", event => { const {row, key} = at(event); this.show(row, key); });
      square.addEventListener("pointerleave", () => this.show(null));
      square.addEventListener("click", event => this.chooseRow(at(event).row));
    }
  }

  // ---- What is chosen ----

  choose(head) {
    for (const view of together ? views : [this]) {
      const same = view === this ? head : view.model.heads.find(one => one.layer === head.layer && one.head === head.head);
      if (!same) continue;
      [view.head, view.lambda] = [same, null];
      view.draw();
      view.options.get(same).scrollIntoView({block: "nearest"});
    }
    remember();
    say(`Layer ${head.layer}, head ${head.head}. ${this.story()}`);
  }

  step(by) {
    const count = this.order.length;
    this.choose(this.order[(this.order.indexOf(this.head) + by + count) % count]);
  }

  setLambda(value) {
    this.lambda = value;
    this.draw();
    remember();
    say(`Lambda ${value === null ? "is the model's own" : fixed(value, 2)}. ${this.story()}`);
  }

  chooseRow(row, extend = false) {
    if (extend) this.setMark([this.mark ? this.mark[0] : this.row, row]);
    for (const view of views) view.moveTo(this.match(view, row));
    remember();
    say(`Token ${row + 1} of ${this.model.size}, ${quoted(this.model.tokens[row])}. ${this.story()}`);
    if (sorting.value === "marked") sortHeads();
  }

  setMark(mark) {
    for (const view of views) {
      view.mark = mark && mark.map(at => this.match(view, at));
      view.drawRow();
    }
    sortHeads();
  }

  match(view, at) {
    if (view === this) return at;
    const found = view.ends.findIndex(end => end >= this.ends[at]);
    return found < 0 ? view.model.size - 1 : found;
  }

  moveTo(row) {
    [this.row, this.preview] = [row, null];
    this.drawRow();
  }

  show(row, key = null) {
    for (const view of views) {
      view.preview = row === null ? null : this.match(view, row);
      view.drawRow(row === null || key === null || key > row ? null : this.match(view, key));
    }
  }

  marked() {
    return this.mark && [Math.min(...this.mark), Math.max(...this.mark)];
  }

  // ---- Drawing ----

  drawThumbs() {
    for (const [head, option] of this.options) paintThumb(option.firstElementChild, this.model.size, head);
  }

  drawHeads() {
    const grid = $(this.root, ".grid"), how = sorting.value;
    this.order = [...this.model.heads];
    if (how !== "place") {
      const value = head => this.measure(head, how);
      this.order.sort((a, b) => how === "entropy" ? value(a) - value(b) : value(b) - value(a));
    }
    for (const head of this.order) {
      const option = this.options.get(head), value = how === "place" ? "" : fixed(this.measure(head, how), 2);
      option.lastElementChild.textContent = value;
      option.style.gridColumnStart = how === "place" && head.head === 0 ? 1 : "";
      option.setAttribute("aria-label", `Layer ${head.layer}, head ${head.head}${value && `, ${sorting.selectedOptions[0].text} ${value}`}`);
    }
    grid.replaceChildren(...this.order.map(head => this.options.get(head)));
  }

  measure(head, how) {
    if (how === "marked") {
      const [from, to] = this.marked() ?? [0, -1];
      let sum = 0;
      for (let key = from; key <= Math.min(to, this.row); key++) sum += left(head, this.row, key);
      return sum;
    }
    head.measures ??= measures(head, this.model.size);
    return head.measures[how];
  }

  draw() {
    const {root, head, model, lambda} = this, second = head.second;
    $(root, ".place h3").textContent = `Layer ${head.layer}, head ${head.head}`;
    paintMap($(root, "[data-kind=left] canvas"), model.size, (row, key) => left(head, row, key, lambda));
    if (second) {
      paintMap($(root, "[data-kind=first] canvas"), model.size, head.first);
      const adds = (lambda ?? head.mean) < 0;
      paintMap($(root, "[data-kind=second] canvas"), model.size, (row, key) => adds ? second(row, key) : -second(row, key));
      $(root, "[data-kind=second] figcaption").innerHTML = `<b>A2</b> what it ${adds ? "adds" : "takes away"}`;
      const slider = $(root, "input"), own = (head.mean - slider.min) / (slider.max - slider.min);
      slider.value = lambda ?? head.mean;
      slider.setAttribute("aria-valuetext", lambda === null ? `${fixed(head.mean, 2)}, the model's own` : fixed(lambda, 2));
      $(root, ".own").style.left = `calc(8px + ${own} * (100% - 16px))`;
      $(root, ".reset").disabled = lambda === null;
      $(root, ".note").textContent = this.aboutLambda();
      const share = measures(head, model.size, lambda).cancelled;
      $(root, ".cancelled").innerHTML = `<b>${Math.round(100 * share)} %</b> of the weight cancels`;
    }
    select($(root, ".grid"), [...this.options.values()], [...this.options.keys()].indexOf(head));
    this.drawRow();
  }

  aboutLambda() {
    const {head, lambda} = this, range = `${fixed(Math.min(...head.lambda), 2)} to ${fixed(Math.max(...head.lambda), 2)}`;
    const own = head.byToken ? `by token, ${range}` : fixed(head.mean, 2);
    if (lambda === null) {
      return `\u03bb is the model\u2019s own: ${own}.` + (head.byToken ? " The slider gives every token the same \u03bb instead." : " Move it, and the difference follows.");
    }
    return `\u03bb = ${fixed(lambda, 2)}${head.byToken ? " for every token" : ""}, not the model\u2019s own (${own}). Only this picture changes: later layers and the prediction are not computed again.`;
  }

  drawRow(key = null) {
    const {root, head, model, lambda} = this, row = this.preview ?? this.row, size = model.size, marks = this.marked();
    const lam = head.second ? lambda ?? head.own(row) : null;
    $(root, "output").textContent = lam === null ? "" : fixed(Math.abs(lam), 2);
    $(root, ".sign").textContent = lam < 0 ? "+" : "\u2212";
    const first = [], rest = [];
    for (let i = 0; i <= row; i++) {
      first.push(head.first(row, i));
      rest.push(left(head, row, i, lambda));
    }
    const height = weight => Math.sqrt(Math.max(0, weight / most));
    const most = Math.max(1e-9, ...first, ...rest, ...rest.map(weight => -weight * (34 / 26) ** 2)); // pixels above and below zero
    this.tokens.forEach((token, i) => {
      const [ghost, up, down] = token.children, weight = i <= row ? rest[i] : 0;
      ghost.style.setProperty("--up", head.second && i <= row ? height(first[i]) : 0);
      up.style.setProperty("--up", height(weight));
      down.style.setProperty("--down", height(-weight));
      token.classList.toggle("later", i > row);
      token.classList.toggle("marked", Boolean(marks) && i >= marks[0] && i <= marks[1]);
    });
    select($(root, ".text"), this.tokens, row);
    for (const line of all(root, ".line")) Object.assign(line.style, {top: `${100 * row / size}%`, height: `${100 / size}%`});
    for (const band of all(root, ".band")) {
      band.hidden = !marks;
      if (marks) Object.assign(band.style, {left: `${100 * marks[0] / size}%`, width: `${100 * (marks[1] + 1 - marks[0]) / size}%`});
    }
    $(root, ".row h3").textContent = `What ${quoted(model.tokens[row])} (token ${row + 1}) reads`;
    $(root, ".following").textContent = "Predicts next: " +
      model.next[row].map(([token, share]) => `${quoted(token)} ${Math.round(100 * share)} %`).join(", ");
    const at = key ?? rest.indexOf(Math.max(...rest));
    $(root, ".cell").textContent = `${quoted(model.tokens[row])} reads ${quoted(model.tokens[at])}: ` + (head.second
      ? `A1 ${fixed(head.first(row, at))}, A2 ${fixed(head.second(row, at))}, left ${fixed(rest[at])}` : fixed(rest[at]));
    for (const canvas of all(root, ".map canvas")) {
      const name = canvas.closest(".map").querySelector("figcaption").textContent;
      canvas.setAttribute("aria-label", `Map ${name}, layer ${head.layer}, head ${head.head}. ${this.story(row)}`);
    }
  }

  // ---- Files ----

  name(ending) {
    return `${this.model.name.replace(/[^\w.-]+/g, "-")}-layer${this.head.layer}-head${this.head.head}.${ending}`;
  }

  savePicture() {
    const small = $(this.root, "[data-kind=left] canvas"), large = document.createElement("canvas");
    large.width = large.height = Math.ceil(1024 / this.model.size) * this.model.size;
    const context = large.getContext("2d");
    context.imageSmoothingEnabled = false;
    context.fillStyle = getComputedStyle($(this.root, ".square")).backgroundColor;
    context.fillRect(0, 0, large.width, large.height);
    context.drawImage(small, 0, 0, large.width, large.height);
    large.toBlob(blob => save(blob, this.name("png")));
  }

  table() {
    const {head, model, lambda} = this, cell = text => `"${text.replaceAll('"', '""')}"`;
    const lines = [["reads", ...model.tokens].map(cell)];
    for (let row = 0; row < model.size; row++)
      lines.push([cell(model.tokens[row]), ...Array.from({length: row + 1}, (_, key) => left(head, row, key, lambda).toFixed(4))]);
    return lines.map(line => line.join(",")).join("\n") + "\n";
  }

  saveTable() {
    save(new Blob([this.table()], {type: "text/csv"}), this.name("csv"));
  }

  // The row in words.
  story(row = this.row) {
    const {head, model, lambda} = this, weights = Array.from({length: row + 1}, (_, key) => [key, left(head, row, key, lambda)]);
    const name = ([key, weight]) => `${quoted(model.tokens[key])} ${fixed(weight, 2)}`;
    const most = [...weights].sort((a, b) => b[1] - a[1]).slice(0, 3).filter(([, weight]) => weight >= 0.005);
    const least = [...weights].sort((a, b) => a[1] - b[1]).slice(0, 2).filter(([, weight]) => weight <= -0.005);
    return `${quoted(model.tokens[row])} reads ${most.map(name).join(", ") || "nothing much"}` +
      (least.length ? `, and subtracts ${least.map(name).join(", ")}.` : ".");
  }
}

// ---- The page ----

function save(blob, name) {
  const link = Object.assign(document.createElement("a"), {href: URL.createObjectURL(blob), download: name});
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}

// The address holds the row, and each model's head and lambda: #row,layer.head,layer.head:lambda
function remember() {
  const state = [views[0].row, ...views.map(view =>
    `${view.head.layer}.${view.head.head}` + (view.lambda === null ? "" : `:${Number(view.lambda.toFixed(2))}`))];
  try { history.replaceState(null, "", `#${state.join(",")}`); } catch { /* a frame without an address */ }
}

function recall() {
  const [row, ...heads] = location.hash.slice(1).split(",");
  if (!/^\d+$/.test(row) || heads.length !== views.length) return;
  heads.forEach((state, i) => {
    const [, layer, head, lambda] = /^(\d+)\.(\d+)(?::(-?[\d.]+))?$/.exec(state) ?? [];
    const found = views[i].model.heads.find(one => one.layer === Number(layer) && one.head === Number(head));
    if (found) [views[i].head, views[i].lambda] = [found, lambda && found.second ? Number(lambda) : null];
  });
  const at = Math.min(Number(row), views[0].model.size - 1);
  for (const view of views) view.row = views[0].match(view, at);
}

// The text, what the models answer, and one sentence on the heads that the page opens with.
function introduce() {
  const {model} = views[0], bold = (tag, text) => Object.assign(document.createElement(tag), {textContent: text});
  $(document, "#prompt").textContent = model.tokens.slice(model.begins ? 1 : 0).join("");
  const answers = views.filter(view => view.model.answer);
  $(document, "#answers").replaceChildren(...answers.flatMap((view, i) =>
    [`${i ? ", " : ""}${view.model.name} goes on with `, bold("b", `\u201c${view.model.answer}\u201d`)]), answers.length ? "." : "");
  const token = views[0].asked(), heads = [views[0].opening(token)];
  for (const view of views.slice(1))
    heads.push(token > 0 ? view.reader(views[0].match(view, token), heads[0].layer) : view.opening(token));
  views.forEach((view, i) => { view.head = heads[i]; });
  for (const view of views) view.mark = view.model.mark;
  if (token <= 0) return;
  const found = views.map((view, i) => {
    const weight = left(heads[i], view.model.size - 1, views[0].match(view, token));
    return `${fixed(weight, 2)} in ${view.model.name} (head ${heads[i].head})`;
  });
  const where = model.mark ? `The answer begins at the marked ${quoted(model.tokens[token])}.`
    : `${model.name} predicts ${quoted(model.tokens[token])}, which stands in the text.`;
  $(document, "#notice").replaceChildren(bold("b", "Notice: "),
    `${where} Of the heads of layer ${heads[0].layer}, the one that reads it most gives it a weight of ${found.join(" and ")}. ` +
    (views.length > 1 ? "These heads are shown." : "This head is shown."));
}

function find(text) {
  const {tokens} = views[0].model, from = views[0].row;
  for (let i = 1; i <= tokens.length; i++) {
    const at = (from + i) % tokens.length;
    if (tokens[at].includes(text)) return views[0].chooseRow(at);
  }
  say(`No token has ${text}.`);
  $(document, "#sorted").textContent = `No token has \u201c${text}\u201d.`;
}

const sorting = $(document, "#sort");

function sortHeads() {
  for (const view of views) view.drawHeads();
  const unmarked = sorting.value === "marked" && !views[0].mark;
  $(document, "#sorted").textContent = unmarked
    ? "No token is marked: press Mark tokens, or hold Shift and choose two tokens of the text." : "";
}

function drawAll() {
  readColours();
  for (const view of views) view.draw();
  requestAnimationFrame(() => { for (const view of views) view.drawThumbs(); });
}

const prefersDark = matchMedia("(prefers-color-scheme: dark)");

function setTheme(scheme) {
  document.documentElement.style.colorScheme = scheme;
  const dark = scheme === "dark" || (!scheme && prefersDark.matches);
  $(document, "#theme").textContent = dark ? "Light" : "Dark";
  $(document, "#theme").setAttribute("aria-label", `Use ${dark ? "light" : "dark"} colours`);
  drawAll();
}

async function open() {
  const scripts = all(document, "script.packed");
  for (const model of await Promise.all(scripts.map(unpack))) views.push(new View(model, views.length));
  scripts.forEach(script => script.remove());
  const main = $(document, "#models"), differential = views.some(view => view.differential);
  main.replaceChildren(...views.map(view => view.root));
  main.classList.toggle("two", views.length > 1);
  for (const view of views) view.root.classList.toggle("paired", views.length > 1);
  $(document, "#lead").textContent = differential
    ? "A differential head forms two maps of the text and subtracts one from the other. What both give to the same tokens is noise, and cancels. What is left is what the head reads."
    : "A head gives each token of the text a weight: row by row, where a token looks among the tokens before it.";
  if (!differential) $(sorting, "[value=cancelled]").remove();
  introduce();
  recall();
  $(document, "#together").hidden = views.length < 2;
  $(document, "#together").setAttribute("aria-pressed", together);
  $(document, "#together").addEventListener("click", event => {
    together = !together;
    event.target.setAttribute("aria-pressed", together);
    if (together) views[0].choose(views[0].head);
  });
  $(document, "#find").addEventListener("keydown", event => { if (event.key === "Enter" && event.target.value) find(event.target.value); });
  addEventListener("hashchange", () => { recall(); for (const view of views) view.draw(); });
  all(document, ".ticks b").forEach((tick, i) => {
    tick.style.left = `${50 + 50 * Math.cbrt([-1, -0.1, 0, 0.1, 1][i])}%`;
  });
  $(document, "#tools").hidden = false;
  document.title = `Attention maps: ${views.map(view => view.model.name).join(", ")}`;
  sorting.addEventListener("change", sortHeads);
  $(document, "#mark").addEventListener("click", event => {
    marking = !marking;
    if (marking) views[0].setMark(null);
    event.target.setAttribute("aria-pressed", marking);
  });
  let screen = "";
  addEventListener("beforeprint", () => { screen = document.documentElement.style.colorScheme; setTheme("light"); });
  addEventListener("afterprint", () => setTheme(screen));
  prefersDark.addEventListener("change", () => setTheme(document.documentElement.style.colorScheme));
  $(document, "#theme").addEventListener("click", event => setTheme(event.target.textContent.toLowerCase()));
  sortHeads();
  setTheme("");
  requestAnimationFrame(() => requestAnimationFrame(() => { document.documentElement.dataset.ready = Math.round(performance.now()); }));
}

open().catch(error => {
  console.error(error);
  $(document, "#models").textContent = `This browser cannot draw the maps (${error.message}); use a newer one.`;
});
