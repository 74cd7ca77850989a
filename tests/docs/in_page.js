// What tests run in a page, before the page's own script: test_play.py, and at the end test_slides.py.

const wrong = [];
addEventListener("error", (event) => wrong.push(event.message));

/** Leave in the page all errors, and what a function returns. */
async function report(run, given) {
  const result = await run(given);
  const made = document.createElement("pre");
  made.id = "report";
  made.textContent = JSON.stringify([wrong, result]);
  document.body.append(made);
}

/** Compute all figures with all settings. */
function compute(all) {
  return all.map((s) => ({
    ring: course.ring(s.ranks),
    step: course.step(s),
    fit: course.fit(s),
    schedule: course.schedule(s.name, s.ranks, s.parts, s.backward),
  }));
}

/** Guess, then move each control. Return what did not work, and the links found in the files. */
async function play(files) {
  const dead = [];
  document.body.style.width = "360px";
  for (const section of document.querySelectorAll("section")) {
    const [guess, form] = section.querySelectorAll("form");
    const [field, button] = [guess.querySelector("input"), guess.querySelector("button")];
    button.click();
    if (!section.querySelector(".play").hidden) dead.push(`${section.id} asks for no guess`);
    if (field.type === "radio") field.click();
    else field.value = 3;
    button.click();
    for (const control of form.querySelectorAll("input, select, button")) {
      const before = section.innerHTML;
      let moved = false;
      for (const use of uses(control, files)) {
        use();
        for (const name of ["input", "change"]) control.dispatchEvent(new Event(name, { bubbles: true }));
        await new Promise((done) => setTimeout(done, 5));
        moved ||= section.innerHTML !== before;
        if (/NaN|undefined|Infinity/.test(section.innerHTML)) dead.push(`${control.name} ${control.value}`);
      }
      if (document.body.scrollWidth > 360) dead.push(`${control.name} makes it too wide for a phone`);
      if (!moved) dead.push(control.name || control.textContent);
    }
  }
  return [dead, files.map(course.readLink)];
}

/** All that one can do with a control, as functions. */
function uses(control, files) {
  if (control.options) return [...control.options].map((x) => () => (control.value = x.value));
  if (control.min) {
    return [control.min, Number(control.min) + 4, control.max].map((x) => () => (control.value = x));
  }
  if (control.type !== "file") return [() => control.click()];
  return files.map((text) => () => {
    const transfer = new DataTransfer();
    transfer.items.add(new File([text], "report.html"));
    control.files = transfer.files;
  });
}

/** Return what cannot be seen on a page of slides. */
function unseen() {
  const found = [];
  document.querySelectorAll("section").forEach((slide, i) => {
    const all = slide.getBoundingClientRect();
    const scale = all.height / 720;
    for (const x of slide.querySelectorAll("*")) {
      const box = x.getBoundingClientRect();
      // The page number is in the lowest 40 pixels.
      const bottom = x.closest("header, footer") ? all.bottom : all.bottom - 40 * scale;
      const outside = box.left < all.left + 20 * scale || box.right > all.right - 20 * scale
        || box.top < all.top || box.bottom > bottom;
      const cut = x.scrollWidth > x.clientWidth + 1 && getComputedStyle(x).display === "block";
      if (outside || cut) found.push(`slide ${i + 1}: ${x.tagName} ${x.textContent.slice(0, 40)}`);
    }
  });
  return found;
}
