(() => {
  const source = document.getElementById("points-data");
  if (!source) return;
  const figures = JSON.parse(source.textContent);
  const at = (name) => document.getElementById(name);
  const [explorer, canvas, tasks, views, panel] = ["explorer", "p-canvas", "p-task", "p-views", "p-input"].map(at);
  const [broken, caption, heading, classes] = ["p-broken", "p-caption", "p-title", "p-classes"].map(at);
  const pen = canvas.getContext("2d");
  const still = matchMedia("(prefers-reduced-motion: reduce)");
  const MOVE = 600, PAD = 14;
  let figure = figures[0], view = 0, chosen = -1, only = -1, from = null, began = 0, frame = 0;
  let places = [], inks = {};

  const element = (name, text, kind) => {
    const node = document.createElement(name);
    if (text !== undefined) node.textContent = text;
    if (kind) node.className = kind;
    return node;
  };
  const className = (number) => (number >= 0 && number < figure.classes.length ? figure.classes[number] : "unknown");
  const wrong = (one, point) => one.predicted[point] >= 0 && figure.true[point] >= 0 && one.predicted[point] !== figure.true[point];
  const brokenPoint = (point) => figure.views.length > 1 && !wrong(figure.views[0], point) && wrong(figure.views[1], point);
  const inView = (point) => (!broken.checked || brokenPoint(point)) && (only < 0 || figure.true[point] === only);

  const scale = () => {
    const [width, height] = figure.size;
    const room = [canvas.clientWidth - 2 * PAD, canvas.clientHeight - 2 * PAD];
    const by = Math.min(room[0] / (width || 1), room[1] / (height || 1));
    return [by, PAD + (room[0] - by * width) / 2, PAD + (room[1] - by * height) / 2];
  };
  const target = () => {
    const [by, left, top] = scale();
    const one = figure.views[view];
    return one.x.map((x, point) => (x === null || one.y[point] === null ? null : [left + by * x, top + by * one.y[point]]));
  };
  const draw = (now) => {
    frame = 0;
    const goal = target();
    const done = from ? Math.min(1, (now - began) / MOVE) : 1;
    const ease = done < 0.5 ? 4 * done ** 3 : 1 - (-2 * done + 2) ** 3 / 2;
    places = goal.map((end, point) => {
      const start = from && from[point];
      return end && start ? [start[0] + ease * (end[0] - start[0]), start[1] + ease * (end[1] - start[1])] : end;
    });
    paint();
    if (done < 1) frame = requestAnimationFrame(draw);
    else { from = null; canvas.dataset.settled = figure.views[view].name; }
  };
  const paint = () => {
    const ratio = devicePixelRatio || 1;
    const [width, height] = [canvas.clientWidth, canvas.clientHeight].map((side) => Math.round(side * ratio));
    if (canvas.width !== width || canvas.height !== height) [canvas.width, canvas.height] = [width, height];
    pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    pen.clearRect(0, 0, canvas.clientWidth, canvas.clientHeight);
    const radius = places.length > 1500 ? 2.6 : 4;
    for (const front of [false, true]) {
      places.forEach((place, point) => {
        if (!place || inView(point) !== front) return;
        pen.globalAlpha = front ? 0.88 : 0.1;
        pen.beginPath();
        const bad = wrong(figure.views[view], point);
        pen.arc(place[0], place[1], bad ? radius - 0.7 : radius, 0, 7);
        const colour = figure.colours[figure.true[point]] || inks.soft;
        if (bad) { pen.lineWidth = 1.7; pen.strokeStyle = colour; pen.stroke(); }
        else { pen.fillStyle = colour; pen.fill(); }
      });
    }
    pen.globalAlpha = 1;
    const mark = chosen >= 0 && places[chosen];
    if (mark) {
      pen.lineWidth = 2;
      pen.strokeStyle = inks.ink;
      pen.beginPath();
      pen.arc(mark[0], mark[1], radius + 4.5, 0, 7);
      pen.stroke();
    }
  };
  const redraw = () => { if (!frame) frame = requestAnimationFrame(draw); };
  const move = () => {
    from = still.matches ? null : places;
    began = performance.now();
    delete canvas.dataset.settled;
    redraw();
  };

  const tell = () => {
    panel.replaceChildren();
    if (chosen < 0) return;
    const image = figure.images[chosen];
    if (image) {
      const picture = element("img");
      picture.src = image;
      picture.alt = `input ${chosen}`;
      panel.append(picture);
    }
    if (figure.texts[chosen]) panel.append(element("blockquote", figure.texts[chosen]));
    const list = element("dl");
    const line = (name, number, kind) => {
      const box = element("div", undefined, kind);
      const value = element("dd");
      const swatch = element("i", undefined, "swatch");
      swatch.style.background = figure.colours[number] || "transparent";
      value.append(swatch, number < 0 && kind ? "–" : className(number));
      if (kind) value.append(element("span", { right: " ✓", wrong: " ✗" }[kind] || "", "sign"));
      box.append(element("dt", name), value);
      list.append(box);
    };
    line("true class", figure.true[chosen]);
    for (const one of figure.views) {
      const said = one.predicted[chosen];
      line(`${one.name} says`, said, said < 0 || figure.true[chosen] < 0 ? "unsure" : wrong(one, chosen) ? "wrong" : "right");
    }
    panel.append(list);
  };
  const choose = (point) => {
    if (point === chosen) return;
    chosen = point;
    canvas.dataset.chosen = String(point);
    tell();
    redraw();
  };
  const nearest = (x, y, most) => {
    let best = -1, least = most;
    places.forEach((place, point) => {
      if (!place || !inView(point)) return;
      const far = Math.hypot(place[0] - x, place[1] - y);
      if (far < least) [best, least] = [point, far];
    });
    return best;
  };
  const step = (dx, dy) => {
    const start = places[chosen];
    if (!start) return choose(nearest(canvas.clientWidth / 2, canvas.clientHeight / 2, Infinity));
    let best = -1, least = Infinity;
    places.forEach((place, point) => {
      if (!place || point === chosen || !inView(point)) return;
      const along = (place[0] - start[0]) * dx + (place[1] - start[1]) * dy;
      const aside = Math.abs((place[0] - start[0]) * dy) + Math.abs((place[1] - start[1]) * dx);
      if (along > 0.5 && along + 2.5 * aside < least) [best, least] = [point, along + 2.5 * aside];
    });
    if (best >= 0) choose(best);
  };

  const showView = () => {
    [...views.children].forEach((button, number) => button.setAttribute("aria-pressed", String(number === view)));
    const one = figure.views[view];
    heading.textContent = one.title || one.name;
    canvas.setAttribute("aria-label", `${figure.title}: ${one.title || one.name}, ${one.x.length} inputs`);
  };
  const showFigure = () => {
    view = Math.min(view, figure.views.length - 1);
    [chosen, only, from, places] = [-1, -1, null, target()];
    views.replaceChildren(...figure.views.map((one, number) => {
      const button = element("button", one.name);
      button.type = "button";
      button.addEventListener("click", () => { view = number; showView(); move(); });
      return button;
    }));
    const many = figure.true.filter((_, point) => brokenPoint(point)).length;
    at("p-broken-text").textContent = `only what merging broke (${many})`;
    caption.textContent = figure.caption;
    classes.replaceChildren(...figure.classes.slice(0, 40).map((name, number) => {
      const item = element("li"), button = element("button"), swatch = element("i", undefined, "swatch");
      button.type = "button";
      button.setAttribute("aria-pressed", "false");
      swatch.style.background = figure.colours[number];
      button.append(swatch, name);
      button.addEventListener("click", () => {
        only = only === number ? -1 : number;
        [...classes.children].forEach((other, place) => other.firstChild.setAttribute("aria-pressed", String(place === only)));
        redraw();
      });
      item.append(button);
      return item;
    }));
    tell();
    showView();
    delete canvas.dataset.settled;
    redraw();
  };

  figures.forEach((one, number) => {
    const option = element("option", one.task || one.title);
    option.value = String(number);
    tasks.append(option);
  });
  tasks.addEventListener("change", () => { figure = figures[Number(tasks.value)]; showFigure(); });
  broken.addEventListener("change", redraw);
  for (const name of ["pointermove", "pointerdown"]) {
    canvas.addEventListener(name, (event) => {
      const point = nearest(event.offsetX, event.offsetY, event.pointerType === "touch" ? 28 : 16);
      if (point >= 0) choose(point);
    });
  }
  canvas.addEventListener("keydown", (event) => {
    const way = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] }[event.key];
    if (way) { event.preventDefault(); step(...way); }
    else if (event.key === "Escape") choose(-1);
  });
  canvas.addEventListener("focus", () => { if (chosen < 0) step(0, 0); });
  const colours = () => {
    const style = getComputedStyle(document.documentElement);
    inks = { ink: style.getPropertyValue("--ink").trim(), soft: style.getPropertyValue("--soft").trim() };
    redraw();
  };
  document.addEventListener("themechange", colours);
  explorer.hidden = false;
  colours();
  showFigure();
  new ResizeObserver(redraw).observe(canvas);
})();
